//! One pipeline to one server: what goes with the claims, so that what they are granted holds.

use std::sync::Arc;

use oncegate_core::marker::Terms;
use redis::{Pipeline, Value};

use super::{Batch, Step, is_strict};
use crate::canary::{self, Canary, NoCanary};
use crate::durability::{self, Durability};
use crate::failure::Failure;
use crate::link::Open;
use crate::record;
use crate::route::{Lane, Lanes};
use crate::script::By;
use crate::watch::{Asked, Stands, Watch};

/// What travels to one server in one pipeline.
pub(super) struct Parcel {
    pub(super) lanes: Arc<Lanes>,
    pub(super) lane: Lane,
    pub(super) asking: bool,
    pub(super) steps: Vec<Step>,
}

/// What one server replied.
pub(super) struct Replies {
    /// To each step.
    pub(super) each: Vec<Value>,
    /// Whether enough replicas know of it.
    pub(super) waited: Result<(), Failure>,
    /// Whether the server still has what it was told.
    pub(super) watched: Result<(), Failure>,
}

impl Batch<'_> {
    /// Sends one parcel and reads a reply to each of its steps.
    pub(super) async fn send(&self, parcel: &Parcel) -> Result<Replies, Failure> {
        let mut pipeline = Pipeline::with_capacity(parcel.steps.len() + 2);
        let mut texts = 0;
        for step in &parcel.steps {
            if parcel.asking {
                pipeline.cmd("ASKING");
            }
            // The first teaches the server the script.
            texts += u32::from(matches!(step, Step::Script(By::Text, _)));
            match step {
                Step::Script(By::Text, call) if texts > 1 => {
                    pipeline.add_command(self.call(By::Hash, call))
                }
                step => pipeline.add_command(self.command(step)),
            };
        }
        let open = parcel.lanes.link(parcel.lane).open().await?;
        let canary = self.look_first(&open, parcel).await?;
        // The last write: whoever has it has the claims before it.
        for command in canary
            .iter()
            .flat_map(|(_, asked)| canary::follow(&asked.keys, asked.least))
        {
            pipeline.add_command(command);
        }
        // The last: it covers everything before it.
        let replicas = match (parcel.lane, self.durability) {
            (Lane::Claims, Durability::Replicas { count, timeout }) => {
                pipeline.cmd("WAIT").arg(count).arg(record::expiry(timeout));
                Some(count)
            }
            _ => None,
        };
        let mut each = open.ask(&pipeline).await?;
        let mut last = || each.pop().unwrap_or(Value::Nil);
        let waited = replicas.map_or(Ok(()), |count| durability::covered(count, &last()));
        let watched = match canary {
            Some((watch, asked)) => {
                let (count, birth) = (last(), last());
                let stands = if waited.is_ok() {
                    Stands::Firmly
                } else {
                    Stands::Perhaps
                };
                self.look_after(parcel, watch, asked, canary::read(birth, &count), stands)
            }
            None => Ok(()),
        };
        if parcel.asking {
            let mut nth = 0;
            each.retain(|_| {
                nth += 1;
                nth % 2 == 0
            });
        }
        Ok(Replies {
            each,
            waited,
            watched,
        })
    }

    /// What is claimed at most once.
    fn strict<'a>(&'a self, parcel: &'a Parcel) -> impl Iterator<Item = &'a Terms> {
        let operations = parcel
            .steps
            .iter()
            .flat_map(Step::operations)
            .map(|index| &self.operations[*index]);
        operations.filter(|it| is_strict(it)).map(|it| &it.terms)
    }

    /// Looks at a server that was connected to anew, if it is to be asked for claims at most once.
    /// Answers with the canary to send after them, where the server has one.
    async fn look_first(
        &self,
        open: &Open<'_>,
        parcel: &Parcel,
    ) -> Result<Option<(&Watch, Asked)>, Failure> {
        let Some(watch) = self.watch.filter(|_| self.strict(parcel).next().is_some()) else {
            return Ok(None);
        };
        watch
            .vouch(
                open,
                self.route,
                &parcel.lanes,
                self.prefix,
                self.durability,
            )
            .await?;
        if let Some(withheld) = self.strict(parcel).find_map(|terms| watch.withholds(terms)) {
            return Err(withheld);
        }
        let keys = watch
            .keys_on(self.route, &parcel.lanes, self.prefix)
            .await?;
        Ok(keys.map(|keys| (watch, watch.asks(keys))))
    }

    /// Reads what the canary said after the claims.
    ///
    /// # Errors
    /// Why nothing that was claimed at most once counts.
    fn look_after(
        &self,
        parcel: &Parcel,
        watch: &Watch,
        asked: Asked,
        read: Result<Canary, NoCanary>,
        stands: Stands,
    ) -> Result<(), Failure> {
        match read {
            Ok(canary) => watch.told(asked, canary, stands),
            // Its slot moves: the next look finds the canary where it is by then.
            Err(NoCanary::Elsewhere { moving, .. }) => self.route.distrust_slot(moving),
            Err(NoCanary::Failed(failure)) => return Err(failure.though_it_may_stand()),
        }
        match self.strict(parcel).find_map(|terms| watch.withholds(terms)) {
            Some(withheld) => Err(withheld.though_it_may_stand()),
            None => Ok(()),
        }
    }
}
