//! Spans: named parts of a step, from [`enter`] until the guard is dropped. They do not affect
//! results.
//!
//! Two kinds of [`Sink`] are notified of spans. The sink of a thread is also notified of the
//! work that [`crate::Memory::install`] runs on another thread for it. A profiler is
//! notified of the spans of all threads. Without a sink a span costs one atomic load.

mod lane;
mod nvtx;

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use lane::Lane;
pub use nvtx::connect_profiler;

static SINKS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OF_THREAD: RefCell<Option<Arc<dyn Sink>>> = const { RefCell::new(None) };
}

/// The name of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// The kind of the span, such as `block`.
    pub name: &'static str,
    /// The index among the spans of this kind, starting at 0.
    pub number: Option<u64>,
}

impl fmt::Display for Label {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(out, "{} {number}", self.name),
            None => out.write_str(self.name),
        }
    }
}

/// A receiver of notifications of spans.
pub trait Sink: Send + Sync {
    /// Called when a span starts, within the open spans of this thread.
    fn enter(&self, label: Label);

    /// Called when the innermost span ends.
    fn exit(&self);
}

/// A guard of a span, which ends when the guard is dropped.
#[must_use = "the span ends when this is dropped"]
pub struct Span {
    of_thread: Option<Arc<dyn Sink>>,
    profiler: Option<&'static dyn Sink>,
    /// A span must end on the thread that started it.
    _stays: PhantomData<*const ()>,
}

/// Starts a span.
pub fn enter(name: &'static str) -> Span {
    Span::of(Label { name, number: None })
}

/// Starts one of several spans of a kind, such as block 3.
pub fn enter_numbered(name: &'static str, number: u64) -> Span {
    Span::of(Label { name, number: Some(number) })
}

impl Span {
    fn of(label: Label) -> Self {
        let mut span = Span { of_thread: None, profiler: None, _stays: PhantomData };
        if SINKS.load(Ordering::Relaxed) > 0 {
            span.profiler = nvtx::profiler();
            span.of_thread = of_thread();
        }
        if let Some(sink) = span.profiler {
            sink.enter(label);
        }
        if let Some(sink) = &span.of_thread {
            sink.enter(label);
        }
        span
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(sink) = &self.of_thread {
            sink.exit();
        }
        if let Some(sink) = self.profiler {
            sink.exit();
        }
    }
}

/// A guard of this thread's sink, which is notified of spans until the guard is dropped.
#[must_use = "the sink is notified of no more spans when this is dropped"]
pub struct Listening {
    _sink: Replaced,
}

/// Notifies `sink` of the spans of this thread, instead of the thread's previous sink.
pub fn listen(sink: Arc<dyn Sink>) -> Listening {
    SINKS.fetch_add(1, Ordering::Relaxed);
    Listening { _sink: Replaced::by(Some(sink)) }
}

impl Drop for Listening {
    fn drop(&mut self) {
        SINKS.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(crate) fn of_thread() -> Option<Arc<dyn Sink>> {
    OF_THREAD.with_borrow(Clone::clone)
}

/// Runs work on this thread on behalf of another thread, with the other thread's sink.
pub(crate) fn on_behalf<R>(sink: Option<Arc<dyn Sink>>, work: impl FnOnce() -> R) -> R {
    // A missing sink also replaces this thread's sink: the work may run while this thread waits within
    // the work of a thread that has a sink.
    let _restored = Replaced::by(sink);
    work()
}

/// A thread's previous sink, which is restored when this value is dropped.
struct Replaced {
    before: Option<Arc<dyn Sink>>,
    /// The value must be dropped on the same thread.
    _stays: PhantomData<*const ()>,
}

impl Replaced {
    fn by(sink: Option<Arc<dyn Sink>>) -> Self {
        Replaced { before: OF_THREAD.replace(sink), _stays: PhantomData }
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        OF_THREAD.set(self.before.take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Cpu, Memory as _};

    #[derive(Default)]
    pub(super) struct Heard(Mutex<Vec<String>>);

    impl Sink for Heard {
        fn enter(&self, label: Label) {
            self.0.lock().unwrap().push(label.to_string());
        }

        fn exit(&self) {
            self.0.lock().unwrap().push("end".into());
        }
    }

    impl Heard {
        pub(super) fn words(&self) -> Vec<String> {
            self.0.lock().unwrap().clone()
        }
    }

    #[test]
    fn a_sink_hears_of_its_threads_spans_while_it_listens() {
        let heard = Arc::new(Heard::default());
        drop(enter("before"));
        let listening = listen(heard.clone());
        {
            let _outer = enter("forward");
            let _inner = enter_numbered("block", 3);
            std::thread::spawn(|| drop(enter("elsewhere"))).join().unwrap();
        }
        drop(listening);
        drop(enter("after"));
        assert_eq!(heard.words(), ["forward", "block 3", "end", "end"]);
    }

    #[test]
    fn a_span_that_outlives_the_listening_still_ends() {
        let heard = Arc::new(Heard::default());
        let listening = listen(heard.clone());
        let span = enter("step");
        drop(listening);
        drop(span);
        assert_eq!(heard.words(), ["step", "end"]);
    }

    #[test]
    fn sinks_follow_the_work_of_a_scope_and_no_other() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let heard = Arc::new(Heard::default());
        let listening = listen(heard.clone());
        // The pool's only thread runs the work and, while it waits there, work without a sink.
        pool.in_place_scope(|_| {
            let sink = of_thread();
            pool.install(|| {
                on_behalf(sink, || {
                    let _own = enter("own");
                    on_behalf(None, || drop(enter("another's")));
                    drop(enter("inner"));
                });
                drop(enter("later"));
            });
        });
        Cpu.install(|| drop(enter("scope")));
        drop(listening);
        assert_eq!(heard.words(), ["own", "inner", "end", "end", "scope", "end"]);
    }
}
