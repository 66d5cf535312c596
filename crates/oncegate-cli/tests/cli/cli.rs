//! Runs the program in a directory with an `oncegate.toml`.

use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate::marker::{Guarantee, Operation, OperationKind, Terms, Token, Verdict};
use oncegate::{MessageId, Redis, Scope, Sqlite, Store};
use oncegate_postgres::Postgres;
use oncegate_testkit::operations::SECOND;
use serde_json::Value;
use sqlx::{Connection, Executor};

/// The exit code and output of the program.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl CommandOutput {
    /// Asserts the exit code.
    #[track_caller]
    pub(crate) fn exits_with(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn prints(self, text: &str) -> Self {
        assert!(
            self.out.contains(text) || self.err.contains(text),
            "no {text:?} in {self:?}"
        );
        self
    }
}

pub(crate) struct TestCli {
    directory: tempfile::TempDir,
    /// Unique for each test.
    pub(crate) name: String,
    pub(crate) redis: String,
    database: Option<TestDatabase>,
}

/// The store, if it is not Redis.
enum TestDatabase {
    Sqlite(PathBuf),
    /// The URL.
    Postgres(String),
}

impl TestCli {
    /// On the shared Redis, with its own prefix.
    pub(crate) fn new() -> Self {
        Self::at(&oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set"))
    }

    pub(crate) fn at(redis: &str) -> Self {
        let cli = Self {
            directory: tempfile::tempdir().expect("a directory"),
            name: format!("cli-{:032x}", Token::random().0),
            redis: redis.to_owned(),
            database: None,
        };
        cli.configure("");
        cli
    }

    /// On its own SQLite file, on the disk of the build directory: the directory for temporary
    /// files may be in memory.
    pub(crate) fn on_sqlite() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let database = TestDatabase::Sqlite(directory.path().join("markers.db"));
        Self::on(directory, database)
    }

    /// On a new schema of the shared PostgreSQL, without tables.
    pub(crate) async fn on_postgres() -> Self {
        let url = oncegate_testkit::postgres_url().expect("ONCEGATE_POSTGRES is set");
        let schema = format!("cli_{:032x}", Token::random().0);
        let url = format!("{url}?options[search_path]={schema}");
        let connection = sqlx::PgConnection::connect(&url).await;
        let create = format!("CREATE SCHEMA {schema}");
        connection
            .expect("PostgreSQL")
            .execute(sqlx::AssertSqlSafe(create))
            .await
            .expect("a schema");
        let directory = tempfile::tempdir().expect("a directory");
        Self::on(directory, TestDatabase::Postgres(url))
    }

    /// The URL of the database of [`on_postgres`](Self::on_postgres).
    pub(crate) fn postgres_url(&self) -> &str {
        match &self.database {
            Some(TestDatabase::Postgres(url)) => url,
            _ => panic!("not on PostgreSQL"),
        }
    }

    fn on(directory: tempfile::TempDir, database: TestDatabase) -> Self {
        let cli = Self {
            directory,
            name: format!("cli-{:032x}", Token::random().0),
            redis: String::new(),
            database: Some(database),
        };
        cli.configure("");
        cli
    }

    pub(crate) fn prefix(&self) -> String {
        format!("test:{}:", self.name)
    }

    /// Writes the configuration: the store and more sections.
    pub(crate) fn configure(&self, more: &str) {
        let store = match &self.database {
            Some(TestDatabase::Sqlite(file)) => format!("url = \"sqlite:{}\"\n", file.display()),
            Some(TestDatabase::Postgres(url)) => format!("url = \"{url}\"\n"),
            None => format!("url = \"{}\"\nprefix = \"{}\"\n", self.redis, self.prefix()),
        };
        self.write("oncegate.toml", &format!("[store]\n{store}{more}"));
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("the directory is writable");
        path
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> CommandOutput {
        run_in(self.directory.path(), arguments, &[])
    }

    /// Runs it with variables.
    pub(crate) fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
        run_in(self.directory.path(), arguments, variables)
    }

    /// The JSON output of a successful command.
    #[track_caller]
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        self.run(&arguments).exits_with(0).json()
    }

    pub(crate) fn store(&self) -> Redis {
        Redis::at(&self.redis)
            .prefix(self.prefix())
            .timeout(10 * SECOND)
    }

    /// The SQLite store as a consumer uses it.
    pub(crate) fn sqlite(&self) -> Option<Sqlite> {
        match &self.database {
            Some(TestDatabase::Sqlite(file)) => Some(Sqlite::file(file).timeout(30 * SECOND)),
            _ => None,
        }
    }

    /// The PostgreSQL store as a consumer uses it.
    pub(crate) fn postgres(&self) -> Option<Postgres> {
        match &self.database {
            Some(TestDatabase::Postgres(url)) => Some(Postgres::url(url).timeout(30 * SECOND)),
            _ => None,
        }
    }

    /// Applies an operation as a consumer does.
    pub(crate) async fn apply_one(
        &self,
        id: &str,
        kind: OperationKind,
        token: u128,
        attempt: u32,
        terms: Terms,
    ) -> Verdict {
        let key = Scope::none().key(&MessageId::new(id).expect("an id"));
        let operation = Operation {
            key,
            kind,
            token: Token(token),
            attempt,
            terms,
        };
        let mut answers = match (self.sqlite(), self.postgres()) {
            (Some(sqlite), _) => sqlite.apply(&[operation]).await,
            (None, Some(postgres)) => postgres.apply(&[operation]).await,
            (None, None) => self.store().apply(&[operation]).await,
        };
        answers.pop().expect("an answer").expect("a verdict")
    }
}

/// At most once, with the default window.
pub(crate) fn terms() -> Terms {
    Terms {
        guarantee: Guarantee::AtMostOnce,
        lease: 600 * SECOND,
        window: 24 * 3_600 * SECOND,
        fingerprint: None,
    }
}

fn run_in(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command
        .current_dir(directory)
        .args(arguments)
        .envs(variables.iter().copied());
    let output = command.output().expect("the program was built");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it writes UTF-8");
    CommandOutput {
        code: output.status.code().expect("no signal ended it"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}
