//! Tokenizer threads, and the way back to the event loop.
//!
//! A job owns all that it needs. Its number stands for the request that waits for it; a request
//! that ends takes the number out: a job that has not begun is then passed over, and the result of
//! one that has finds nobody. Threads speak to the event loop through one mailbox, which an eventfd
//! announces.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};
use nginx_sys::{
    NGX_OK, ngx_connection_t, ngx_event_t, ngx_free_connection, ngx_get_connection,
    ngx_handle_read_event, ngx_http_request_t, ngx_int_t,
};
use parking_lot::Mutex;

use super::askers::{Asked, Askers};
use super::body::Body;
use super::context::KnownModel;
use super::log::{cycle_log, log};
use super::process;
use crate::events::Level;
use crate::lookup;
use crate::prompt::{Endpoint, Limits, Models, Outcome, Question, Step};
use crate::remote::Remotes;
use crate::types::Skip;

/// Jobs that may wait for each thread.
const QUEUE: usize = 64;

pub struct Job {
    pub endpoint: Endpoint,
    pub body: Body,
    pub max_text: usize,
    pub deadline: Option<Instant>,
    pub want_text: bool,
    pub known: KnownModel,
}

/// What a job has come to on its thread.
enum Done {
    Outcome(Outcome),
    Ask(Question, Vec<u8>),
}

impl Job {
    fn run(&self, body: Body, models: &Models, remotes: &Remotes) -> Done {
        let failed = |model| Done::Outcome(Outcome { model, result: Err(Skip::Failed) });
        let Ok(body) = body.read() else { return failed(None) };
        let limits = Limits { max_text: self.max_text, deadline: self.deadline };
        let tokenize = || {
            let known = |model| self.known.set(model);
            let (endpoint, want_text) = (self.endpoint, self.want_text);
            lookup::tokenize(models, remotes, endpoint, &body, &limits, want_text, known)
        };
        match catch_unwind(AssertUnwindSafe(tokenize)) {
            Ok(Step::Done(outcome)) => Done::Outcome(outcome),
            Ok(Step::Ask(question)) => Done::Ask(question, body),
            Err(_) => failed(self.known.get()),
        }
    }
}

/// Who waits for a job.
#[derive(Clone, Copy)]
pub struct Waiter {
    pub request: *mut ngx_http_request_t,
    pub resume: unsafe fn(*mut ngx_http_request_t, Outcome),
}

enum Letter {
    Done(u64, Outcome),
    Line(Level, String),
}

/// What threads have to say to the event loop.
pub struct Mailbox {
    letters: Mutex<VecDeque<Letter>>,
    bell: OwnedFd,
}

impl Mailbox {
    fn new() -> std::io::Result<Mailbox> {
        // SAFETY: a plain system call; the descriptor is ours alone.
        let bell = unsafe {
            let fd = libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        Ok(Mailbox { letters: Mutex::default(), bell })
    }

    fn post(&self, letter: Letter) {
        self.letters.lock().push_back(letter);
        let one = 1u64;
        // SAFETY: writes eight bytes to an open eventfd. It fails only when its count is full,
        // and then the bell has rung.
        unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// What a job has come to.
    pub fn done(&self, id: u64, outcome: Outcome) {
        self.post(Letter::Done(id, outcome));
    }

    /// A line for nginx's log.
    pub fn line(&self, level: Level, text: String) {
        self.post(Letter::Line(level, text));
    }

    fn take(&self) -> VecDeque<Letter> {
        let mut count = 0u64;
        // SAFETY: reads eight bytes from an open eventfd; it holds nothing after that.
        unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut count).cast(), 8) };
        std::mem::take(&mut *self.letters.lock())
    }
}

/// Lives as long as somebody waits for a job.
pub struct Wanted;

struct Queued {
    id: u64,
    wanted: Weak<Wanted>,
    job: Job,
}

pub struct Jobs {
    mailbox: Arc<Mailbox>,
    queue: Option<Sender<Queued>>,
    threads: Vec<JoinHandle<()>>,
    waiters: RefCell<HashMap<u64, (Waiter, Arc<Wanted>)>>,
    next: Cell<u64>,
    connection: *mut ngx_connection_t,
}

impl Jobs {
    /// Starts the tokenizer threads, one that loads the models, and those that ask for the tokens
    /// of remote ones.
    pub fn start(
        threads: usize,
        models: &Arc<Models>,
        remotes: &Arc<Remotes>,
    ) -> Result<Jobs, String> {
        let mailbox = Arc::new(Mailbox::new().map_err(|e| format!("eventfd: {e}"))?);
        let connection = listen(&mailbox)?;
        let (queue, jobs) = bounded(QUEUE * threads);
        let started = masked(|| -> std::io::Result<Vec<JoinHandle<()>>> {
            let askers = Askers::start(remotes, models, &mailbox)?;
            let mut all = vec![loader(models.clone(), mailbox.clone())?];
            for _ in 0..threads {
                all.push(worker(models.clone(), askers.clone(), mailbox.clone(), jobs.clone())?);
            }
            Ok(all)
        });
        Ok(Jobs {
            mailbox,
            queue: Some(queue),
            threads: started.map_err(|e| format!("thread: {e}"))?,
            waiters: RefCell::default(),
            next: Cell::new(1),
            connection,
        })
    }

    pub fn mailbox(&self) -> Arc<Mailbox> {
        self.mailbox.clone()
    }

    /// Hands a job over; its number, or the job again if the queue is full.
    pub fn submit(&self, job: Job, waiter: Waiter) -> Result<u64, Job> {
        let id = self.next.replace(self.next.get() + 1);
        let Some(queue) = &self.queue else { return Err(job) };
        let wanted = Arc::new(Wanted);
        let queued = Queued { id, wanted: Arc::downgrade(&wanted), job };
        queue.try_send(queued).map_err(|error| error.into_inner().job)?;
        self.waiters.borrow_mut().insert(id, (waiter, wanted));
        Ok(id)
    }

    /// Nobody waits for this job any more.
    pub fn cancel(&self, id: u64) {
        self.waiters.borrow_mut().remove(&id);
    }

    /// Joins the threads: each ends with the job that it has in hand. Nobody waits any more: a
    /// worker that exits resumes no request.
    pub fn stop(&mut self) {
        self.queue = None;
        self.waiters.borrow_mut().clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.deliver();
        // SAFETY: the connection is ours; its descriptor belongs to the mailbox.
        unsafe {
            (*self.connection).fd = -1;
            ngx_free_connection(self.connection);
        }
    }

    /// Reads the mailbox: resumes requests and writes log lines.
    fn deliver(&self) {
        for letter in self.mailbox.take() {
            // A letter that fails keeps none of the others back.
            super::guard((), || self.open(letter));
        }
    }

    fn open(&self, letter: Letter) {
        match letter {
            Letter::Done(id, outcome) => {
                let waiter = self.waiters.borrow_mut().remove(&id);
                if let Some((waiter, _)) = waiter {
                    // SAFETY: a request takes its waiter out before it ends.
                    unsafe { (waiter.resume)(waiter.request, outcome) };
                }
            }
            Letter::Line(Level::Error, text) => log!(ERR, cycle_log(), "kvc_aware: {text}"),
            Letter::Line(Level::Warn, text) => log!(WARN, cycle_log(), "kvc_aware: {text}"),
            Letter::Line(Level::Notice, text) => log!(NOTICE, cycle_log(), "kvc_aware: {text}"),
        }
    }
}

fn worker(
    models: Arc<Models>,
    askers: Askers,
    mailbox: Arc<Mailbox>,
    jobs: Receiver<Queued>,
) -> std::io::Result<JoinHandle<()>> {
    Builder::new().name("kvc-tokens".to_owned()).spawn(move || {
        while let Ok(Queued { id, wanted, mut job }) = jobs.recv() {
            if wanted.strong_count() == 0 {
                continue;
            }
            let body = std::mem::take(&mut job.body);
            match job.run(body, &models, askers.remotes()) {
                Done::Outcome(outcome) => mailbox.done(id, outcome),
                Done::Ask(question, body) => {
                    let asked = Asked { id, wanted, question, body, deadline: job.deadline };
                    if let Some(outcome) = askers.submit(asked) {
                        mailbox.done(id, outcome);
                    }
                }
            }
        }
    })
}

fn loader(models: Arc<Models>, mailbox: Arc<Mailbox>) -> std::io::Result<JoinHandle<()>> {
    Builder::new().name("kvc-load".to_owned()).spawn(move || {
        models.load_all(|name, loaded| match loaded {
            Ok(info) => mailbox.line(
                Level::Notice,
                format!(
                    "model \"{name}\" loaded in {} ms, {} MB in this worker",
                    info.time.as_millis(),
                    info.memory.div_ceil(1 << 20)
                ),
            ),
            Err(error) => {
                mailbox.line(Level::Warn, format!("model \"{name}\" is not available: {error}"));
            }
        });
    })
}

/// Runs what starts threads with all signals blocked: a thread inherits the mask, and nginx's
/// signals must reach its main thread.
pub fn masked<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: plain system calls on masks of this thread.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let started = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started
    }
}

/// Puts the mailbox's bell among the events that nginx waits for.
fn listen(mailbox: &Mailbox) -> Result<*mut ngx_connection_t, String> {
    // SAFETY: in init_process the event module is ready. `channel` marks the connection as none
    // of a client's, so that a worker that exits does not report it as left open.
    unsafe {
        let connection = ngx_get_connection(mailbox.bell.as_raw_fd(), cycle_log());
        if connection.is_null() {
            return Err("no connection left".to_owned());
        }
        let read = (*connection).read;
        (*read).handler = Some(ring);
        (*read).log = cycle_log();
        (*read).set_channel(1);
        if ngx_handle_read_event(read, 0) != NGX_OK as ngx_int_t {
            ngx_free_connection(connection);
            return Err("eventfd: cannot be waited for".to_owned());
        }
        Ok(connection)
    }
}

unsafe extern "C" fn ring(_event: *mut ngx_event_t) {
    if let Some(process) = process::get() {
        process.jobs.deliver();
    }
}
