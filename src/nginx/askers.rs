//! Threads that ask engines for the tokens of remote models, apart from those that tokenize: an
//! engine that is slow must not hold up the others' requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::jobs::{Mailbox, Wanted};
use crate::events::Level;
use crate::lookup;
use crate::prompt::{Models, Outcome, Question};
use crate::remote::Remotes;
use crate::types::Skip;

/// Questions that are out at one time.
const THREADS: usize = 4;

/// Questions that may wait for each thread.
const QUEUE: usize = 64;

/// A job that waits for an engine.
pub struct Asked {
    pub id: u64,
    pub wanted: Weak<Wanted>,
    pub question: Question,
    pub body: Vec<u8>,
    pub deadline: Option<Instant>,
}

/// The way to the threads, which end when nobody has it any more. They are not joined: one may wait
/// for an engine for as long as its deadline says, and holds nothing that must be given back.
#[derive(Clone)]
pub struct Askers {
    remotes: Arc<Remotes>,
    queue: Sender<Asked>,
}

impl Askers {
    /// Starts the threads, if there is a remote model.
    pub fn start(
        remotes: &Arc<Remotes>,
        models: &Arc<Models>,
        mailbox: &Arc<Mailbox>,
    ) -> std::io::Result<Askers> {
        let threads = if remotes.is_empty() { 0 } else { THREADS };
        let (queue, questions) = bounded(QUEUE * THREADS);
        for _ in 0..threads {
            let asker = Asker {
                remotes: remotes.clone(),
                models: models.clone(),
                mailbox: mailbox.clone(),
                questions: questions.clone(),
            };
            Builder::new().name("kvc-ask".to_owned()).spawn(move || asker.run())?;
        }
        Ok(Askers { remotes: remotes.clone(), queue })
    }

    pub fn remotes(&self) -> &Remotes {
        &self.remotes
    }

    /// Hands a question over. If the queue is full: what the job comes to instead.
    pub fn submit(&self, asked: Asked) -> Option<Outcome> {
        let refused = self.queue.try_send(asked).err()?.into_inner();
        Some(Outcome { model: Some(refused.question.model()), result: Err(Skip::QueueFull) })
    }
}

struct Asker {
    remotes: Arc<Remotes>,
    models: Arc<Models>,
    mailbox: Arc<Mailbox>,
    questions: Receiver<Asked>,
}

impl Asker {
    fn run(self) {
        while let Ok(Asked { id, wanted, question, body, deadline }) = self.questions.recv() {
            if wanted.strong_count() == 0 {
                continue;
            }
            let model = question.model();
            let ask = || lookup::ask(&self.remotes, question, &body, deadline);
            let (outcome, error) = catch_unwind(AssertUnwindSafe(ask))
                .unwrap_or((Outcome { model: Some(model), result: Err(Skip::Failed) }, None));
            if let Some(error) = error.filter(|error| self.remotes.worth_logging(model, error)) {
                let name = self.models.name(model);
                self.mailbox.line(Level::Warn, format!("no tokens of model \"{name}\": {error}"));
            }
            self.mailbox.done(id, outcome);
        }
    }
}
