//! The spans of a background thread, which belong to the recording of the moment.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Label, Sink};

/// Forwards the spans of a background thread to a sink that can change while spans are open, since the
/// thread's work does not start and end with a recording. The thread listens to the lane
/// ([`super::listen`]).
#[derive(Default)]
pub struct Lane(Mutex<State>);

#[derive(Default)]
struct State {
    open: Vec<Label>,
    sink: Option<Arc<dyn Sink>>,
}

impl Lane {
    /// Forwards the spans to `sink` from now on, including spans that are open now; `None` forwards no spans.
    /// Spans that are still open stay open in the previous sink.
    pub fn connect(&self, sink: Option<Arc<dyn Sink>>) {
        let mut state = self.locked();
        if let Some(sink) = &sink {
            state.open.iter().for_each(|&label| sink.enter(label));
        }
        state.sink = sink;
    }

    /// Locks the state and ignores poisoning: the state is consistent whenever a thread can panic.
    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink for Lane {
    fn enter(&self, label: Label) {
        let mut state = self.locked();
        state.open.push(label);
        if let Some(sink) = &state.sink {
            sink.enter(label);
        }
    }

    fn exit(&self) {
        let mut state = self.locked();
        state.open.pop();
        if let Some(sink) = &state.sink {
            sink.exit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Heard;
    use super::super::{enter, listen};
    use super::*;

    #[test]
    fn each_sink_hears_of_the_spans_that_are_open_while_it_is_connected() {
        let lane = Arc::new(Lane::default());
        let [first, second] = [(); 2].map(|()| Arc::new(Heard::default()));
        let (to, connected) = (lane.clone(), [first.clone(), second.clone()]);
        std::thread::spawn(move || {
            let _listening = listen(to.clone());
            let [first, second] = connected;
            let write = enter("write");
            to.connect(Some(first));
            let hash = enter("hash");
            to.connect(Some(second));
            drop(hash);
            drop(write);
            drop(enter("sync"));
            to.connect(None);
            drop(enter("later"));
        })
        .join()
        .unwrap();
        assert_eq!(first.words(), ["write", "hash"]);
        assert_eq!(second.words(), ["write", "hash", "end", "end", "sync", "end"]);
    }
}
