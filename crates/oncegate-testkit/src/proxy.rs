//! A TCP proxy between a client and its server that loses replies, resets connections, and delays
//! or holds back bytes.
//!
//! Unlike general network tools it can lose the reply to a chosen request *after* the server has
//! executed the request.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar};
use std::thread;
use std::time::Duration;

use oncegate_core::internal::Lock;

/// What happens to one request: the bytes of one read, usually one command or one pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestFault {
    /// The request and its reply are forwarded.
    Pass,
    /// The request is forwarded and executed; its reply is discarded and the connection closed.
    LoseReply,
    /// The request is not forwarded; the connection is closed.
    Reset,
    /// The request is forwarded after this time.
    Delay(Duration),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Forwarding {
    On,
    Off,
}

/// A proxy on a free port of 127.0.0.1. Dropping it closes every connection through it.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

/// Chooses the fault of a request.
type ChooseFault = Box<dyn FnMut(&mut [u8]) -> RequestFault + Send>;

struct Shared {
    /// The port of the server to which new connections go.
    server: AtomicU16,
    choose_fault: Lock<ChooseFault>,
    connections: Lock<Vec<[TcpStream; 2]>>,
    forwarding: Lock<Forwarding>,
    forwarding_changed: Condvar,
    closed: AtomicBool,
    lost_replies: AtomicU64,
}

impl Proxy {
    /// A proxy to a port of 127.0.0.1 that forwards everything.
    ///
    /// # Errors
    /// The operating system's, if there is no free port.
    pub fn to(server: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            server: AtomicU16::new(server),
            choose_fault: Lock::new(Box::new(|_| RequestFault::Pass)),
            connections: Lock::default(),
            forwarding: Lock::new(Forwarding::On),
            forwarding_changed: Condvar::new(),
            closed: AtomicBool::new(false),
            lost_replies: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.closed.load(Ordering::SeqCst) {
                    return;
                }
                // If the server refuses the connection, the client sees a closed one.
                let _ = accepting.connect(client);
            }
        });
        Ok(Self { port, shared })
    }

    /// The port on which the proxy listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets the function that chooses the fault of each following request, on all connections. It
    /// is called with the bytes of one read, which it may change.
    pub fn inject_faults(&self, choose: impl FnMut(&mut [u8]) -> RequestFault + Send + 'static) {
        *self.shared.choose_fault.lock() = Box::new(choose);
    }

    /// Forwards everything again.
    pub fn pass(&self) {
        self.inject_faults(|_| RequestFault::Pass);
        self.shared.set_forwarding(Forwarding::On);
    }

    /// Holds back all bytes in both directions until [`pass`](Self::pass) or
    /// [`end_black_hole`](Self::end_black_hole), which forward them, like retransmitted TCP
    /// segments. Connections stay open, and new ones are accepted.
    pub fn black_hole(&self) {
        self.shared.set_forwarding(Forwarding::Off);
    }

    /// Ends a [`black_hole`](Self::black_hole) and keeps the faults of
    /// [`inject_faults`](Self::inject_faults).
    pub fn end_black_hole(&self) {
        self.shared.set_forwarding(Forwarding::On);
    }

    /// Closes every connection; new ones go to this port of 127.0.0.1, as after a failover.
    pub fn fail_over_to(&self, server: u16) {
        self.shared.server.store(server, Ordering::SeqCst);
        self.reset();
    }

    /// Closes every connection; new ones are accepted.
    pub fn reset(&self) {
        for pair in self.shared.connections.lock().drain(..) {
            close(&pair);
        }
    }

    /// The number of lost replies.
    pub fn lost_replies(&self) -> u64 {
        self.shared.lost_replies.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // The connection wakes the accepting thread, which then ends. If the connection fails, the
        // thread has ended already.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        self.reset();
        self.shared.set_forwarding(Forwarding::On);
    }
}

/// Whether a request contains a word, for instance `EVALSHA`.
pub fn contains(request: &[u8], word: &str) -> bool {
    request
        .windows(word.len())
        .any(|part| part == word.as_bytes())
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.server.load(Ordering::SeqCst)))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let loses_reply = Arc::new(AtomicBool::new(false));
        self.connections
            .lock()
            .push([client.try_clone()?, server.try_clone()?]);
        let (to_server, to_client) = ([client.try_clone()?, server.try_clone()?], [server, client]);
        let (requests, replies) = (self.clone(), self.clone());
        let chosen = loses_reply.clone();
        thread::spawn(move || {
            requests.forward(to_server, |shared, request| {
                shared.forwards_request(request, &chosen)
            })
        });
        thread::spawn(move || {
            replies.forward(to_client, |shared, _| shared.forwards_reply(&loses_reply))
        });
        Ok(())
    }

    /// Forwards bytes from the first stream to the second until one is closed or `may_forward`
    /// returns false; then closes both.
    fn forward(
        &self,
        [mut from, mut to]: [TcpStream; 2],
        mut may_forward: impl FnMut(&Self, &mut [u8]) -> bool,
    ) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            self.wait_until_forwarding();
            if !may_forward(self, &mut buffer[..read]) || to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        close(&[from, to]);
    }

    fn set_forwarding(&self, forwarding: Forwarding) {
        *self.forwarding.lock() = forwarding;
        self.forwarding_changed.notify_all();
    }

    fn wait_until_forwarding(&self) {
        let paused = |forwarding: &mut Forwarding| {
            *forwarding == Forwarding::Off && !self.closed.load(Ordering::SeqCst)
        };
        drop(
            self.forwarding_changed
                .wait_while(self.forwarding.lock(), paused),
        );
    }

    /// Applies the chosen fault and returns whether the request is forwarded. Sets `loses_reply` if
    /// the reply must be discarded.
    fn forwards_request(&self, request: &mut [u8], loses_reply: &AtomicBool) -> bool {
        let fault = self.choose_fault.lock()(request);
        match fault {
            RequestFault::Pass => true,
            RequestFault::Reset => false,
            RequestFault::LoseReply => {
                loses_reply.store(true, Ordering::SeqCst);
                true
            }
            RequestFault::Delay(time) => {
                thread::sleep(time);
                true
            }
        }
    }

    /// Returns whether the reply is forwarded; otherwise the connection is closed. By now the
    /// server has executed the request.
    fn forwards_reply(&self, loses_reply: &AtomicBool) -> bool {
        let is_lost = loses_reply.load(Ordering::SeqCst);
        if is_lost {
            self.lost_replies.fetch_add(1, Ordering::SeqCst);
        }
        !is_lost
    }
}

fn close(pair: &[TcpStream; 2]) {
    for stream in pair {
        // Fails if the stream is closed already.
        let _ = stream.shutdown(Shutdown::Both);
    }
}
