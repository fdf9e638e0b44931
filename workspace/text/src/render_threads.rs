//! Rendering in threads that can be abandoned: a template is a program, and may never end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::{ChatTemplate, Conversation, Error, Renderer, Result, TrainedTurns, TrainingText};

/// Interval at which a caller checks whether to stop.
const WAIT: Duration = Duration::from_millis(20);
/// Abandoned threads that still run; beyond this number, no other thread is started.
const MAX_GIVEN_UP: usize = 4;
/// The stack of a thread: dropping nested lists needs stack for each level. Only the used stack takes memory.
const STACK_BYTES: usize = 1 << 28;

/// Renders conversations, each in its own thread that is abandoned after some time. Callers from any number of threads
/// share the value. An abandoned rendering may continue in its thread, within bounded memory, until the rendering or
/// the process ends.
#[derive(Debug)]
pub struct RenderThreads {
    template: Arc<ChatTemplate>,
    limit: Duration,
    idle: Mutex<Vec<RenderThread>>,
    /// Abandoned threads that may still run.
    given_up: Mutex<Vec<JoinHandle<()>>>,
}

/// A thread that waits for work. It ends when the value is dropped.
#[derive(Debug)]
struct RenderThread {
    work: Sender<Work>,
    begun: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

type Work = Box<dyn FnOnce(&Renderer<'_>) + Send>;

impl RenderThreads {
    /// Creates threads for this template, and compiles the template once to check it. A rendering is abandoned after
    /// `limit`; a training text has several renderings.
    pub fn new(template: ChatTemplate, limit: Duration) -> Result<Self> {
        template.renderer()?;
        let (idle, given_up) = (Mutex::default(), Mutex::default());
        Ok(Self { template: Arc::new(template), limit, idle, given_up })
    }

    /// Returns the template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Renders as [`Renderer::render`]. Fails if the rendering takes too long.
    pub fn render(&self, conversation: &Arc<Conversation>, prompts: bool) -> Result<String> {
        let conversation = Arc::clone(conversation);
        self.run(move |renderer| renderer.render(&conversation, prompts), &AtomicBool::new(false))
    }

    /// Renders as [`Renderer::training_text`]. Fails if one of its renderings takes too long, and with
    /// [`Error::Interrupted`] soon after `stop` is set.
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
        let waiting = locked(&self.idle).pop();
        let thread = waiting.map_or_else(|| self.start(), Ok)?;
        let (sender, result) = sync_channel(1);
        // A thread that has ended sends no result. Without a receiver, nobody waits for the result.
        let _ = thread.work.send(Box::new(move |renderer| drop(sender.send(work(renderer)))));
        let (mut begun, mut since) = (0, Instant::now());
        loop {
            match result.recv_timeout(WAIT) {
                Ok(result) => {
                    locked(&self.idle).push(thread);
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
                locked(&self.given_up).push(thread.thread);
                return Err(if is_stopped { Error::Interrupted } else { self.too_long() });
            }
        }
    }

    fn start(&self) -> Result<RenderThread> {
        let mut given_up = locked(&self.given_up);
        given_up.retain(|thread| !thread.is_finished());
        if given_up.len() >= MAX_GIVEN_UP {
            return Err(self.too_long());
        }
        let (work, received) = channel::<Work>();
        let begun = Arc::<AtomicU64>::default();
        let (template, counted) = (Arc::clone(&self.template), Arc::clone(&begun));
        let main = move || {
            if let Ok(mut renderer) = template.renderer() {
                renderer.begun = counted;
                received.iter().for_each(|work| work(&renderer));
            }
        };
        let builder = Builder::new().name("chat template".to_owned()).stack_size(STACK_BYTES);
        let thread = builder.spawn(main).map_err(|error| {
            Error::Invalid(format!("no thread can be started for the chat template: {error}"))
        })?;
        Ok(RenderThread { work, begun, thread })
    }

    fn too_long(&self) -> Error {
        Error::Invalid(format!(
            "the chat template takes longer than {} s for a conversation: look for a loop that does not end or a value \
             that grows in it",
            self.limit.as_secs()
        ))
    }
}

fn locked<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
