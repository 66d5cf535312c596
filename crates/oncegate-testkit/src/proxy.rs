//! A TCP proxy between a client and its server that loses replies, falls silent, resets and delays.
//!
//! It does what tools outside the protocol cannot: the reply to a chosen request is lost *after*
//! the server has carried the request out.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// What becomes of one request: what one read brought, mostly one command or one pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It arrives, and so does its reply.
    Pass,
    /// It arrives and is carried out; its reply is lost and the connection closed.
    LoseReply,
    /// It never arrives; the connection is closed.
    Reset,
    /// It arrives after this long.
    Delay(Duration),
}

/// Whether anything passes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Light {
    On,
    Off,
}

/// A proxy on a free port of 127.0.0.1. Dropping it closes every connection through it.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

type Judge = Box<dyn FnMut(&mut [u8]) -> Fate + Send>;

struct Shared {
    server: u16,
    judge: Mutex<Judge>,
    connections: Mutex<Vec<[TcpStream; 2]>>,
    light: Mutex<Light>,
    light_changed: Condvar,
    over: AtomicBool,
    lost: AtomicU64,
}

impl Proxy {
    /// A proxy to a port of 127.0.0.1 that passes everything.
    ///
    /// # Errors
    /// The system's, when there is no port.
    pub fn to(server: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            server,
            judge: Mutex::new(Box::new(|_| Fate::Pass)),
            connections: Mutex::default(),
            light: Mutex::new(Light::On),
            light_changed: Condvar::new(),
            over: AtomicBool::new(false),
            lost: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.over.load(Ordering::SeqCst) {
                    return;
                }
                // Who cannot be connected is dropped, which the client sees as a closed connection.
                let _ = accepting.connect(client);
            }
        });
        Ok(Self { port, shared })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Decides the fate of each request from now on, and may change its bytes; called with what one
    /// read brought, on all connections in turn.
    pub fn judge(&self, judge: impl FnMut(&mut [u8]) -> Fate + Send + 'static) {
        *lock(&self.shared.judge) = Box::new(judge);
    }

    /// Passes everything again.
    pub fn pass(&self) {
        self.judge(|_| Fate::Pass);
        self.shared.turn(Light::On);
    }

    /// Nothing arrives on either side from now on, until [`pass`](Self::pass): then it does, as TCP
    /// would send it again. Connections stay open, and new ones are accepted.
    pub fn black_hole(&self) {
        self.shared.turn(Light::Off);
    }

    /// Ends a [`black_hole`](Self::black_hole) and nothing else: what [`judge`](Self::judge) was
    /// told stays.
    pub fn lighten(&self) {
        self.shared.turn(Light::On);
    }

    /// Closes every connection; new ones are accepted.
    pub fn reset(&self) {
        for pair in lock(&self.shared.connections).drain(..) {
            close(&pair);
        }
    }

    /// How many replies were lost so far.
    pub fn lost_replies(&self) -> u64 {
        self.shared.lost.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts; where that fails it has ended.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        self.reset();
        self.shared.turn(Light::On);
    }
}

/// Whether a request holds a word, say `EVALSHA`, anywhere.
pub fn holds(request: &[u8], word: &str) -> bool {
    request
        .windows(word.len())
        .any(|part| part == word.as_bytes())
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.server))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let losing = Arc::new(AtomicBool::new(false));
        lock(&self.connections).push([client.try_clone()?, server.try_clone()?]);
        let (to_server, to_client) = ([client.try_clone()?, server.try_clone()?], [server, client]);
        let (requests, replies) = (self.clone(), self.clone());
        let lost = losing.clone();
        thread::spawn(move || {
            requests.carry(to_server, |shared, request| {
                shared.request(request, &losing)
            })
        });
        thread::spawn(move || replies.carry(to_client, |shared, _| shared.reply(&lost)));
        Ok(())
    }

    /// Carries what comes from the first to the second until either closes or `pass` says no.
    fn carry(
        &self,
        [mut from, mut to]: [TcpStream; 2],
        mut pass: impl FnMut(&Self, &mut [u8]) -> bool,
    ) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            self.wait_for_light();
            if !pass(self, &mut buffer[..read]) || to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        close(&[from, to]);
    }

    fn turn(&self, light: Light) {
        *lock(&self.light) = light;
        self.light_changed.notify_all();
    }

    fn wait_for_light(&self) {
        let dark = |light: &mut Light| *light == Light::Off && !self.over.load(Ordering::SeqCst);
        drop(self.light_changed.wait_while(lock(&self.light), dark));
    }

    fn request(&self, request: &mut [u8], losing: &AtomicBool) -> bool {
        let fate = lock(&self.judge)(request);
        match fate {
            Fate::Pass => true,
            Fate::Reset => false,
            Fate::LoseReply => {
                losing.store(true, Ordering::SeqCst);
                true
            }
            Fate::Delay(time) => {
                thread::sleep(time);
                true
            }
        }
    }

    /// The server has carried out what it replies to; the connection closes over a reply that is to
    /// be lost.
    fn reply(&self, losing: &AtomicBool) -> bool {
        let loses = losing.load(Ordering::SeqCst);
        if loses {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        !loses
    }
}

fn close(pair: &[TcpStream; 2]) {
    for stream in pair {
        // It may be closed already.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
