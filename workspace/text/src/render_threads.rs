//! Rendering in threads that can be given up: a template is a program, of which some never end.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{ChatTemplate, Conversation, Error, Renderer, Result, TrainedTurns, TrainingText};

/// Time after which a caller looks whether it is to stop.
const WAIT: Duration = Duration::from_millis(20);
/// Threads that were given up and still run, with which no other is started.
const MAX_GIVEN_UP: usize = 4;
/// The stack of a thread, of which only what is used takes memory: dropping a list in lists needs a part for each.
const STACK_BYTES: usize = 1 << 28;

/// Renders conversations, each in a thread of its own that is given up after some time; callers from any number of threads
/// share it. A rendering that was given up may go on in its thread, within bounded memory, until it ends or the process
/// does.
#[derive(Debug)]
pub struct RenderThreads {
    template: Arc<ChatTemplate>,
    limit: Duration,
    idle: Mutex<Vec<RenderThread>>,
    given_up: Arc<AtomicUsize>,
}

/// A thread that waits for work; it ends when this is dropped.
#[derive(Debug)]
struct RenderThread {
    work: Sender<Work>,
    /// Renderings that it has begun.
    begun: Arc<AtomicU64>,
    is_given_up: Arc<AtomicBool>,
}

type Work = Box<dyn FnOnce(&Renderer<'_>) + Send>;

impl RenderThreads {
    /// Threads for this template, which is compiled once to see that it can be. A rendering, of which a training text has
    /// several, is given up after `limit`.
    ///
    /// # Errors
    /// Fails if the template is no Jinja.
    pub fn new(template: ChatTemplate, limit: Duration) -> Result<Self> {
        template.renderer()?;
        let (template, idle) = (Arc::new(template), Mutex::default());
        Ok(Self { template, limit, idle, given_up: Arc::default() })
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// As [`Renderer::render`].
    ///
    /// # Errors
    /// As [`Renderer::render`]; fails if it takes too long.
    pub fn render(&self, conversation: &Arc<Conversation>, prompts: bool) -> Result<String> {
        let conversation = Arc::clone(conversation);
        self.run(move |renderer| renderer.render(&conversation, prompts), &AtomicBool::new(false))
    }

    /// As [`Renderer::training_text`]; [`Error::Interrupted`] soon after `stop` is set.
    ///
    /// # Errors
    /// As [`Renderer::training_text`]; fails if one of its renderings takes too long.
    pub fn training_text(
        &self,
        conversation: &Arc<Conversation>,
        turns: TrainedTurns,
        stop: &AtomicBool,
    ) -> Result<TrainingText> {
        let conversation = Arc::clone(conversation);
        self.run(move |renderer| renderer.training_text(&conversation, turns), stop)
    }

    fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Renderer<'_>) -> Result<T> + Send + 'static,
        stop: &AtomicBool,
    ) -> Result<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = idle().pop();
        let thread = waiting.map_or_else(|| self.start(), Ok)?;
        let (sender, result) = sync_channel(1);
        // A thread that has ended gives no result, and without a receiver nobody waits for one.
        let _ = thread.work.send(Box::new(move |renderer| drop(sender.send(work(renderer)))));
        let (mut begun, mut since) = (0, Instant::now());
        loop {
            match result.recv_timeout(WAIT) {
                Ok(result) => {
                    idle().push(thread);
                    return result;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Invalid(
                        "the chat template's engine has panicked".to_owned(),
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = thread.begun.load(Ordering::Relaxed);
            if now != begun {
                (begun, since) = (now, Instant::now());
            }
            let is_stopped = stop.load(Ordering::Relaxed);
            if is_stopped || since.elapsed() > self.limit {
                self.given_up.fetch_add(1, Ordering::Relaxed);
                thread.is_given_up.store(true, Ordering::Relaxed);
                return Err(if is_stopped { Error::Interrupted } else { self.too_long() });
            }
        }
    }

    fn start(&self) -> Result<RenderThread> {
        if self.given_up.load(Ordering::Relaxed) >= MAX_GIVEN_UP {
            return Err(self.too_long());
        }
        let (work, received) = channel::<Work>();
        let thread = RenderThread { work, begun: Arc::default(), is_given_up: Arc::default() };
        let (template, given_up) = (Arc::clone(&self.template), Arc::clone(&self.given_up));
        let (begun, is_given_up) = (Arc::clone(&thread.begun), Arc::clone(&thread.is_given_up));
        let main = move || {
            if let Ok(mut renderer) = template.renderer() {
                renderer.begun = begun;
                received.iter().for_each(|work| work(&renderer));
            }
            if is_given_up.load(Ordering::Relaxed) {
                given_up.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let builder = std::thread::Builder::new().name("chat template".to_owned());
        builder.stack_size(STACK_BYTES).spawn(main).map_err(|error| {
            Error::Invalid(format!("no thread can be started for the chat template: {error}"))
        })?;
        Ok(thread)
    }

    fn too_long(&self) -> Error {
        Error::Invalid(format!(
            "the chat template takes longer than {} s for a conversation: look for a loop that does not end or a value \
             that grows in it",
            self.limit.as_secs()
        ))
    }
}
