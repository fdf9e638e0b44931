//! The spans of a background thread, which belong to whatever is recorded at the time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Label, Sink};

/// Passes the spans of a background thread on to a sink that changes while they are open, since the
/// thread's work does not begin and end with what is recorded. The thread listens to it
/// ([`super::listen`]).
#[derive(Default)]
pub struct Lane(Mutex<State>);

#[derive(Default)]
struct State {
    open: Vec<Label>,
    sink: Option<Arc<dyn Sink>>,
}

impl Lane {
    /// Passes the spans on to `sink` from now on, those that are open now included, or to none.
    /// Spans that the previous sink has not seen end stay open there.
    pub fn connect(&self, sink: Option<Arc<dyn Sink>>) {
        let mut state = self.locked();
        if let Some(sink) = &sink {
            state.open.iter().for_each(|&label| sink.enter(label));
        }
        state.sink = sink;
    }

    /// Consistent whenever a thread can panic.
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
