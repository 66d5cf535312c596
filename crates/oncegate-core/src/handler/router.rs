//! Several types of messages in one topic or queue, each with its own handler.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;

use serde::Deserialize;

use super::{Failure, Handler, Reconciled};
use crate::context::Context;
use crate::decode::Decode;
use crate::message::Message;
use crate::store::BoxError;

/// A handler that passes each message to the handler of its type. Each route has its own payload
/// type; all are decoded by the [`Decode`] of the consumer.
///
/// A message without a route is dead-lettered with the reason `no-route`, unless there is a handler
/// for [all others](Router::otherwise). So is a message with two different headers of the name that
/// routes are selected by. `reconcile` is called on the handler of the same route.
///
/// Not for handlers with transactions: they match an enum in their payload.
///
/// ```
/// # use oncegate_core::{Context, Failure, Router, handler_fn};
/// # async fn created(_: String, _: Context) -> Result<(), Failure> { Ok(()) }
/// # async fn refunded(_: u64, _: Context) -> Result<(), Failure> { Ok(()) }
/// let handler = Router::by_header("type")
///     .route("payment.created", handler_fn(created))
///     .route("payment.refunded", handler_fn(refunded));
/// ```
pub struct Router<R = NoRoutes> {
    route_key: RouteKey,
    /// The name of each route, in the order in which they were added; `None` for
    /// [`otherwise`](Router::otherwise).
    names: Vec<Option<Box<[u8]>>>,
    routes: R,
}

/// A user's function that reads the name of a route: [`Router::by`].
type ReadRoute = dyn Fn(&Message) -> Option<Vec<u8>> + Send + Sync;

/// The part of a message that names its route.
enum RouteKey {
    Header(Box<str>),
    Key,
    By(Box<ReadRoute>),
}

impl fmt::Display for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header `{name}`"),
            Self::Key => f.write_str("key"),
            Self::By(_) => f.write_str("function"),
        }
    }
}

impl Router {
    /// Selects the route by the header of this name.
    pub fn by_header(name: &str) -> Self {
        Self::new(RouteKey::Header(name.into()))
    }

    /// Selects the route by the CloudEvents type in the Kafka binding: the header `ce_type`.
    pub fn by_cloud_events_type() -> Self {
        Self::by_header("ce_type")
    }

    /// Selects the route by the key: see [`Message::key`]. On RabbitMQ it is the routing key, unless
    /// the source names a header.
    pub fn by_key() -> Self {
        Self::new(RouteKey::Key)
    }

    /// Selects the route by a function of the message. `None` is a message without a route.
    pub fn by(read: impl Fn(&Message) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::new(RouteKey::By(Box::new(read)))
    }

    fn new(route_key: RouteKey) -> Self {
        Self {
            route_key,
            names: Vec::new(),
            routes: NoRoutes,
        }
    }
}

impl<R> Router<R> {
    /// The handler of the messages with this exact value. The consumer does not start if two routes
    /// have the same value.
    pub fn route<H: Handler>(self, value: impl AsRef<[u8]>, handler: H) -> Router<Route<H, R>> {
        self.with(Some(value.as_ref().into()), handler)
    }

    /// The handler of all messages without a route, including those without the header or key.
    pub fn otherwise<H: Handler>(self, handler: H) -> Router<Route<H, R>> {
        self.with(None, handler)
    }

    fn with<H>(mut self, name: Option<Box<[u8]>>, handler: H) -> Router<Route<H, R>> {
        let position = self.names.len();
        self.names.push(name);
        Router {
            route_key: self.route_key,
            names: self.names,
            routes: Route {
                position,
                handler,
                others: self.routes,
            },
        }
    }

    /// The position of the route of a message.
    fn select(&self, message: &Message) -> Result<usize, NoRoute> {
        let name = match &self.route_key {
            RouteKey::Header(name) => message.headers.unique(name).map_err(NoRoute)?.flatten(),
            RouteKey::Key => message.key.as_deref(),
            RouteKey::By(read) => {
                let name = read(message).map(Cow::Owned);
                return self.position(name.as_deref());
            }
        };
        self.position(name)
    }

    fn position(&self, name: Option<&[u8]>) -> Result<usize, NoRoute> {
        let of = |wanted| self.names.iter().position(|name| name.as_deref() == wanted);
        let named = name.and_then(|name| of(Some(name)));
        named.or_else(|| of(None)).ok_or_else(|| {
            let key = &self.route_key;
            NoRoute(match name {
                Some(_) => format!("the router has no route for the value of the {key}"),
                None => format!("the message has no route, because it has no value of the {key}"),
            })
        })
    }
}

impl<H: Handler, R: Routes> Handler for Router<Route<H, R>> {
    type Payload = RoutedPayload<H::Payload, R::Payload>;

    async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure> {
        self.routes.handle(payload, cx).await
    }

    async fn reconcile(&self, payload: Self::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        self.routes.reconcile(payload, cx).await
    }

    fn decode_payload<D: Decode>(
        &self,
        decode: &D,
        message: &Message,
    ) -> Result<Self::Payload, BoxError> {
        self.routes.decode(self.select(message)?, decode, message)
    }

    fn check_routes(&self) -> Result<(), String> {
        if let RouteKey::Header(name) = &self.route_key
            && name.is_empty()
        {
            return Err("the name of the router's header is empty".into());
        }
        for (position, name) in self.names.iter().enumerate() {
            if self.names[..position].contains(name) {
                return Err(match name {
                    Some(name) => {
                        format!("the router has two routes for `{}`", name.escape_ascii())
                    }
                    None => "the router has two handlers for all other messages".into(),
                });
            }
        }
        self.routes.check()
    }
}

impl<R> fmt::Debug for Router<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router")
            .field("route_key", &format_args!("{}", self.route_key))
            .field("routes", &self.names.len())
            .finish_non_exhaustive()
    }
}

/// Why a message is dead-lettered as [`NoRoute`](crate::lifecycle::Reason::NoRoute). The text does
/// not quote the message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoRoute(String);

/// The routes of a [`Router`]: nested, so that each handler and payload keeps its type. Only
/// [`Route`] and [`NoRoutes`] implement it.
pub trait Routes: Send + Sync + 'static {
    /// The payload of one of the routes.
    type Payload: Send;

    /// Decodes the payload of the route at this position.
    ///
    /// # Errors
    /// Those of [`Decode`].
    #[doc(hidden)]
    fn decode<D: Decode>(
        &self,
        position: usize,
        decode: &D,
        message: &Message,
    ) -> Result<Self::Payload, BoxError>;

    /// Checks the routes of handlers that are routers.
    ///
    /// # Errors
    /// As [`Handler::check_routes`].
    #[doc(hidden)]
    fn check(&self) -> Result<(), String>;

    /// Calls the handler of the payload's route.
    ///
    /// # Errors
    /// Those of the handler.
    #[doc(hidden)]
    fn handle(
        &self,
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Calls `reconcile` of the payload's route.
    ///
    /// # Errors
    /// Those of the handler.
    #[doc(hidden)]
    fn reconcile(
        &self,
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<Reconciled, Failure>> + Send;
}

/// The routes of a router that has none yet.
#[derive(Debug)]
pub struct NoRoutes;

impl Routes for NoRoutes {
    type Payload = Infallible;

    fn decode<D: Decode>(&self, _: usize, _: &D, _: &Message) -> Result<Infallible, BoxError> {
        Err(NoRoute("the router has no routes".into()).into()) // not reached: `select` returns a position of a route
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    async fn handle(&self, payload: Infallible, _: &Context) -> Result<(), Failure> {
        match payload {}
    }

    async fn reconcile(&self, payload: Infallible, _: &Context) -> Result<Reconciled, Failure> {
        match payload {}
    }
}

/// A route, and those that were added before it.
#[derive(Debug)]
pub struct Route<H, R> {
    position: usize,
    handler: H,
    others: R,
}

impl<H: Handler, R: Routes> Routes for Route<H, R> {
    type Payload = RoutedPayload<H::Payload, R::Payload>;

    fn decode<D: Decode>(
        &self,
        position: usize,
        decode: &D,
        message: &Message,
    ) -> Result<Self::Payload, BoxError> {
        if position == self.position {
            let payload = self.handler.decode_payload(decode, message)?;
            return Ok(RoutedPayload::Here(payload));
        }
        let payload = self.others.decode(position, decode, message)?;
        Ok(RoutedPayload::Other(payload))
    }

    fn check(&self) -> Result<(), String> {
        self.handler.check_routes()?;
        self.others.check()
    }

    async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure> {
        match payload {
            RoutedPayload::Here(payload) => self.handler.handle(payload, cx).await,
            RoutedPayload::Other(payload) => self.others.handle(payload, cx).await,
        }
    }

    async fn reconcile(&self, payload: Self::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        match payload {
            RoutedPayload::Here(payload) => self.handler.reconcile(payload, cx).await,
            RoutedPayload::Other(payload) => self.others.reconcile(payload, cx).await,
        }
    }
}

/// The payload of a message with a route.
#[doc(hidden)]
#[derive(Debug)]
pub enum RoutedPayload<P, Q> {
    /// The payload of the last route.
    Here(P),
    /// The payload of a route that was added before it.
    Other(Q),
}

impl<'de, P, Q> Deserialize<'de> for RoutedPayload<P, Q> {
    /// Returns an error: [`Router`] decodes the payload, because its type depends on the message.
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(serde::de::Error::custom(
            "the payload of a router is decoded by its routes",
        ))
    }
}
