//! From inputs to encoded documents, in order. Readers cut inputs into chunks of whole records, the threads of the pool
//! parse and encode them, and one thread receives the results in the order of the inputs. Several inputs, or parts of
//! one input, are read at once. Each has its share of the memory, so that the first never waits for the others.

mod budget;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::Scope;
use std::time::Duration;

use rayon::Scope as Tasks;
use serde::{Deserialize, Serialize};

use self::budget::{Budget, Permit};
use crate::prepare::encode::Encoder;
use crate::prepare::encode::chat::{ChatEncoder, Rendered};
use crate::prepare::reader::{
    self, BadRecord, Chunk, Format, Identity, OpenInput, Position, ReadOptions, Record,
};
use crate::prepare::remote::Downloads;
use crate::prepare::{ChatNotes, Error, Result};

/// Bytes in memory for each byte of a chunk: its records, their texts, their ids, and the encoder's buffers.
const MEMORY_FACTOR: u64 = 8;
/// Bytes of chunks in flight for each thread of the pool, of a part. More bytes would leave the processor's caches
/// before they are encoded.
const AHEAD_BYTES: u64 = 4 << 20;
/// Threads of the pool that one reader supplies with text.
const THREADS_A_READER: usize = 4;
const MAX_UNNAMED: usize = 100;
/// Interval at which the receiver is told that nothing has arrived.
const WAIT: Duration = Duration::from_millis(50);

impl ChatNotes {
    pub(crate) fn add(&mut self, other: &Self) {
        self.misread += other.misread;
        self.untrained += other.untrained;
        for (key, count) in &other.unnamed {
            if self.unnamed.len() < MAX_UNNAMED || self.unnamed.contains_key(key) {
                *self.unnamed.entry(key.clone()).or_default() += count;
            }
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) input: usize,
    pub(crate) part: usize,
    pub(crate) position: Position,
}

pub(crate) struct Work<'a> {
    pub(crate) inputs: &'a Downloads,
    pub(crate) format: Option<Format>,
    pub(crate) encoding: &'a Encoding<'a>,
    pub(crate) read: Arc<ReadOptions>,
    pub(crate) end: Option<u32>,
    pub(crate) hashes: bool,
    pub(crate) wants: &'a (dyn Fn(&blake3::Hash) -> bool + Sync),
    pub(crate) memory: u64,
}

pub(crate) enum Encoding<'a> {
    Texts(Box<Encoder<'a>>),
    Conversations(ChatEncoder<'a>),
}

/// An event of the pipeline, in the order of the inputs.
pub(crate) enum Event {
    Opened(usize, Option<Identity>),
    Batch(Batch),
    Finished(usize),
    /// Nothing has arrived for a while, for example during the download of an input.
    Waiting,
}

pub(crate) struct Batch {
    /// The place after the last record, where reading can resume.
    pub(crate) end: Place,
    pub(crate) documents: Vec<Document>,
    pub(crate) bad: Vec<BadRecord>,
    /// Stored bytes of the input.
    pub(crate) input_bytes: u64,
    pub(crate) notes: ChatNotes,
    /// Returned to the budget when the batch is dropped.
    _permit: Permit,
}

pub(crate) struct Document {
    /// Includes the post-processor's ids and the end of the text. Empty for a text without tokens.
    pub(crate) ids: Vec<u32>,
    /// 1 for each id of a conversation that is trained on, otherwise 0; empty for a text.
    pub(crate) mask: Vec<u8>,
    pub(crate) special: Vec<u32>,
    pub(crate) text_bytes: u64,
    pub(crate) hash: Option<blake3::Hash>,
    pub(crate) is_wanted: bool,
}

struct PartStream {
    input: usize,
    /// The input, and whether this is its last part.
    opened: Result<(Arc<OpenInput>, bool)>,
    batches: Receiver<Receiver<Result<Batch>>>,
}

struct Shared<'a> {
    work: &'a Work<'a>,
    stopped: AtomicBool,
    /// Bytes of chunks in flight, for each part.
    share: u64,
}

/// Reads the inputs from `start` on, and passes events to `receive`. An error of `receive` stops the reading.
pub(crate) fn run(
    work: &Work<'_>,
    start: Place,
    receive: &mut (dyn FnMut(Event) -> Result<()> + Send),
) -> Result<()> {
    let ahead = rayon::current_num_threads().div_ceil(THREADS_A_READER) + 1;
    // A further part ends while the next part begins.
    let parts = ahead as u64 + 1;
    let most = rayon::current_num_threads() as u64 * AHEAD_BYTES;
    let share = (work.memory / MEMORY_FACTOR / parts).clamp(1, most);
    let shared = Shared { work, stopped: AtomicBool::new(false), share };
    rayon::in_place_scope(|tasks| {
        std::thread::scope(|threads| {
            // One part is received, and one part is ready.
            let (parts, received) = sync_channel(ahead - 1);
            let shared = &shared;
            threads.spawn(move || feed(shared, start, threads, tasks, &parts));
            let done = receive_all(work, &received, receive);
            // Stops readers that wait for the receiver, and tasks that have not started.
            shared.stopped.store(true, Ordering::Relaxed);
            work.inputs.stop();
            drop(received);
            done
        })
    })
}

fn receive_all(
    work: &Work<'_>,
    parts: &Receiver<PartStream>,
    receive: &mut (dyn FnMut(Event) -> Result<()> + Send),
) -> Result<()> {
    while let Some(PartStream { input, opened, batches }) = next(parts, receive)? {
        let (open, is_last) = opened?;
        let identity = work.inputs.identity(input).or_else(|| open.identity.clone());
        receive(Event::Opened(input, identity))?;
        while let Some(batch) = next(&batches, receive)? {
            // A task without a result has panicked: the scope of tasks passes the panic on.
            let Some(batch) = next(&batch, receive)? else { return Ok(()) };
            match batch.and_then(|batch| receive(Event::Batch(batch))) {
                Err(error) if !matches!(error, Error::Interrupted) => {
                    // If the input changed while it was read, reports that instead of the error.
                    open.check_unchanged()?;
                    return Err(error);
                }
                done => done?,
            }
        }
        if is_last {
            open.check_unchanged()?;
            receive(Event::Finished(input))?;
            work.inputs.release(input)?;
        }
    }
    Ok(())
}

/// Returns the next item of `channel`, or `None` at the end. `receive` is told of a wait.
fn next<T>(
    channel: &Receiver<T>,
    receive: &mut (dyn FnMut(Event) -> Result<()> + Send),
) -> Result<Option<T>> {
    loop {
        match channel.recv_timeout(WAIT) {
            Ok(next) => return Ok(Some(next)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => receive(Event::Waiting)?,
        }
    }
}

/// Opens the inputs in order and starts a reader for each part, while `parts` has room.
fn feed<'scope, 'env, 'tasks>(
    shared: &'tasks Shared<'tasks>,
    start: Place,
    threads: &'scope Scope<'scope, 'env>,
    tasks: &'scope Tasks<'tasks>,
    parts: &SyncSender<PartStream>,
) where
    'tasks: 'scope,
{
    let mut from = start;
    let work = shared.work;
    for number in start.input..work.inputs.len() {
        let open = work.inputs.path(number);
        let open = open.and_then(|path| reader::open(&path, work.format, Arc::clone(&work.read)));
        let open = match open {
            Ok(open) => Arc::new(open),
            Err(error) => {
                let (_, batches) = channel();
                // Without a receiver nobody waits for the error.
                let _ = parts.send(PartStream { input: number, opened: Err(error), batches });
                return;
            }
        };
        let count = open.parts();
        for part in from.part..count {
            let budget = Budget::new(shared.share);
            let (slots, batches) = channel();
            let opened = Ok((Arc::clone(&open), part + 1 == count));
            if parts.send(PartStream { input: number, opened, batches }).is_err() {
                return;
            }
            let open = Arc::clone(&open);
            let place = Place { input: number, part, position: from.position };
            threads.spawn(move || read_part(shared, &open, place, &budget, tasks, &slots));
            from.position = Position::default();
        }
        from = Place::default();
    }
}

/// Reads the chunks of a part, and starts a task to encode each chunk.
fn read_part<'tasks>(
    shared: &'tasks Shared<'tasks>,
    open: &OpenInput,
    mut place: Place,
    budget: &Arc<Budget>,
    tasks: &Tasks<'tasks>,
    slots: &Sender<Receiver<Result<Batch>>>,
) {
    let fail = |error| {
        let (result, slot) = sync_channel(1);
        // The channel has room, and without a receiver nobody waits for the error.
        let _ = result.send(Err(error)).map(|()| slots.send(slot));
    };
    let mut reader = match open.read(place.part, place.position) {
        Ok(reader) => reader,
        Err(error) => return fail(error),
    };
    loop {
        let chunk = match reader.next_chunk() {
            Ok(Some(chunk)) => chunk,
            Ok(None) => return,
            Err(error) => return fail(error),
        };
        place.position = chunk.end;
        if shared.stopped.load(Ordering::Relaxed) {
            return;
        }
        let permit = budget.take(chunk.bytes());
        let (result, slot) = sync_channel(1);
        if slots.send(slot).is_err() {
            return;
        }
        let end = place;
        tasks.spawn(move |_| {
            if !shared.stopped.load(Ordering::Relaxed) {
                // Without a receiver nobody waits for the documents.
                let _ = result.send(encode(shared, &chunk, end, permit));
            }
        });
    }
}

fn encode(shared: &Shared<'_>, chunk: &Chunk, end: Place, permit: Permit) -> Result<Batch> {
    let (documents, bad, notes) = (Vec::new(), Vec::new(), ChatNotes::default());
    let input_bytes = chunk.input_bytes;
    let mut batch = Batch { end, documents, bad, input_bytes, notes, _permit: permit };
    chunk.documents().try_for_each(|record| batch.push(shared, record))?;
    Ok(batch)
}

impl Batch {
    fn push(&mut self, shared: &Shared<'_>, record: Record<'_>) -> Result<()> {
        let work = shared.work;
        let record = match record {
            Ok(record) => record,
            Err(bad) => {
                self.bad.push(bad);
                return Ok(());
            }
        };
        match work.encoding {
            Encoding::Texts(encoder) => {
                self.documents.push(Document::of_text(work, encoder, &record.text)?);
            }
            Encoding::Conversations(chat) => match chat.render(&record.text, &shared.stopped) {
                Ok(rendered) => {
                    self.notes.add(&rendered.text.notes);
                    self.documents.push(Document::of_conversation(work, chat, &rendered)?);
                }
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => {
                    self.bad.push(BadRecord { place: record.place, reason: error.to_string() });
                }
            },
        }
        Ok(())
    }
}

impl Document {
    /// Creates a document with this text, without encoding it.
    fn new(work: &Work<'_>, text: &str) -> Self {
        let hash = work.hashes.then(|| blake3::hash(text.as_bytes()));
        let is_wanted = hash.as_ref().is_none_or(|hash| (work.wants)(hash));
        let (ids, mask, special) = (Vec::new(), Vec::new(), Vec::new());
        Self { ids, mask, special, text_bytes: text.len() as u64, hash, is_wanted }
    }

    fn of_conversation(
        work: &Work<'_>,
        chat: &ChatEncoder<'_>,
        rendered: &Rendered,
    ) -> Result<Self> {
        let mut document = Self::new(work, &rendered.text.text);
        document.special = rendered.special.clone();
        if document.is_wanted {
            (document.ids, document.mask) = chat.encode(rendered)?;
        }
        Ok(document)
    }

    fn of_text(work: &Work<'_>, encoder: &Encoder<'_>, text: &str) -> Result<Self> {
        let mut document = Self::new(work, text);
        if document.is_wanted {
            let encoded = encoder.encode(text)?;
            (document.ids, document.special) = (encoded.ids, encoded.special_in_text);
            // A document without tokens is skipped.
            if !document.ids.is_empty() {
                document.ids.extend(work.end);
            }
        }
        Ok(document)
    }
}
