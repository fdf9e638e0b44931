//! The server from its start to its end: the engine on this thread, the clients on others.

use std::io::{Write as _, stdout};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use moh_kernels::open_device::{Compute, DeviceName, available_memory};
use moh_kernels::{Backend, Element};
use moh_model::{BatchOptions, Model, ModelConfig};
use moh_program::{counted, exit, options};
use moh_serve::api::{self, Checkpoint, LayerDescription, Served};
use moh_serve::engine::{Admission, Handle, Inbox, Limits, Scheduler, queue};
use moh_serve::guard::Guard;
use moh_serve::metrics::Metrics;
use moh_serve::source::Source;
use moh_serve::{page, server};
use moh_text::ChatTemplate;

use crate::arguments::Arguments;

/// The time for which an idle engine waits before it looks for a newer checkpoint.
const IDLE: Duration = Duration::from_millis(100);
/// The time between two looks for a newer checkpoint.
const WATCH: Duration = Duration::from_secs(2);
/// Bytes of the cache on a GPU, and where the memory that is available is not known, unless told otherwise.
const DEFAULT_CACHE_BYTES: u64 = 4 << 30;
/// Threads that parse, tokenize and render for clients.
const BLOCKING_THREADS: usize = 4;
/// The time that tasks have to end after the last connection.
const LAST_TASKS: Duration = Duration::from_secs(5);

/// A server that is about to start.
pub struct Serve<'a> {
    arguments: &'a Arguments,
    source: Source,
    config: ModelConfig,
    served: Arc<Served>,
    inbox: Inbox,
    guard: Guard,
    listener: TcpListener,
}

impl<'a> Serve<'a> {
    /// Reads all but the weights, and takes the port.
    pub fn prepare(arguments: &'a Arguments) -> anyhow::Result<Self> {
        let source = Source::locate(&arguments.model, arguments.revision.as_deref())?;
        if arguments.watch_run {
            source.run()?;
        }
        let config = source.config()?;
        let keys = arguments.keys()?;
        let guard = Guard::new(keys.iter().map(String::as_str), arguments.host.is_loopback());
        let (engine, inbox) = queue(arguments.max_queue);
        let served = Arc::new(describe(arguments, &source, &config, engine)?);
        let listener = listen(SocketAddr::new(arguments.host, arguments.port))?;
        Ok(Serve { arguments, source, config, served, inbox, guard, listener })
    }
}

/// What clients are told.
fn describe(
    arguments: &Arguments,
    source: &Source,
    config: &ModelConfig,
    engine: Handle,
) -> anyhow::Result<Served> {
    let directory = source.tokenizer()?;
    let tokenizer = moh_program::models::required_tokenizer(&directory)?;
    let positions = config.max_position_embeddings;
    let context = arguments.max_model_len.unwrap_or(positions);
    if context > positions {
        bail!("--max-model-len {context}: the model has {positions} positions");
    }
    let served = Served {
        name: arguments.served_model_name.clone().unwrap_or_else(|| arguments.model.clone()),
        end_tokens: moh_hf::end_tokens(&source.files(), config)?,
        template: template(&directory)?,
        tokenizer,
        context,
        vocab_size: config.vocab_size,
        checkpoint: RwLock::default(),
        engine,
        metrics: Arc::new(Metrics::default()),
        request_timeout: arguments.request_timeout.map(Duration::from_secs),
        is_ending: AtomicBool::new(false),
        started: SystemTime::now(),
    };
    served.set_checkpoint(checkpoint(source, config));
    Ok(served)
}

/// What clients are told of a checkpoint.
fn checkpoint(source: &Source, config: &ModelConfig) -> Checkpoint {
    let layers = (0..config.num_hidden_layers).map(|layer| heads(config, layer)).collect();
    Checkpoint { step: source.step(), layers }
}

fn heads(config: &ModelConfig, layer: usize) -> LayerDescription {
    let (of_layer, heads) = (config.layer_heads(layer), config.num_attention_heads);
    let shared = (0..heads).filter(|&head| of_layer.shared.contains(head)).collect();
    LayerDescription { heads, active: of_layer.active(), shared }
}

/// The chat template of the tokenizer, if it has one; one that is no Jinja is an error.
fn template(directory: &Path) -> anyhow::Result<Option<ChatTemplate>> {
    let Some(template) = ChatTemplate::find(directory)? else { return Ok(None) };
    template.renderer()?;
    Ok(Some(template))
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("--host {} --port {}: cannot listen there", address.ip(), address.port())
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

impl Compute for Serve<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output {
        let Serve { arguments, source, config, served, inbox, guard, listener } = self;
        let (positions, metrics) = (served.context, Arc::clone(&served.metrics));
        let vocab_size = served.tokenizer.vocab_size();
        let model: Model<B, T> = source.load(backend.clone(), positions)?;
        let options = cache_options(arguments, &config, &model)?;
        let newest = Arc::new(AtomicU64::new(source.step().unwrap_or_default()));
        if arguments.watch_run {
            watch(&source, Arc::clone(&newest))?;
        }
        let mut engine = Engine { source, inbox, newest, served: Arc::downgrade(&served) };
        start(served, guard, listener, arguments.max_connections)?;

        let limits = Limits {
            sequences: arguments.max_num_seqs,
            prompt_tokens: arguments.chunked_prefill_size,
        };
        let (mut waiting, mut loaded) = (Vec::new(), Some(model));
        loop {
            let Some(model) = loaded.take().or_else(|| engine.load_newest(&backend, positions))
            else {
                return Ok(());
            };
            let mut scheduler =
                Scheduler::new(&model, options, limits, vocab_size, Arc::clone(&metrics))?;
            waiting.drain(..).for_each(|submission| scheduler.add(submission));
            if engine.run(&mut scheduler) {
                return Ok(());
            }
            waiting.extend(scheduler.into_waiting());
        }
    }
}

/// What the engine's thread needs beside a model.
struct Engine {
    /// The model that is computed.
    source: Source,
    inbox: Inbox,
    /// The step of the run's newest checkpoint.
    newest: Arc<AtomicU64>,
    /// What clients are told. The queue is closed when nobody has it any more, so the engine must not keep it.
    served: Weak<Served>,
}

impl Engine {
    /// Whether the run has no other newest checkpoint.
    fn is_current(&self) -> bool {
        self.source.step().is_none_or(|step| step == self.newest.load(Ordering::Relaxed))
    }

    /// Computes until nobody can ask any more, or else until there is another checkpoint.
    fn run<B: Backend, T: Element>(&self, scheduler: &mut Scheduler<'_, B, T>) -> bool {
        loop {
            let patience = if scheduler.is_empty() { IDLE } else { Duration::ZERO };
            let is_open = scheduler.take(&self.inbox, patience);
            if !is_open && scheduler.is_empty() {
                return true;
            }
            if self.is_current() {
                scheduler.step(Admission::Open);
            } else if scheduler.is_drained() {
                return false;
            } else {
                scheduler.step(Admission::OnlyBegun);
            }
        }
    }

    /// Loads the newest checkpoint, or else the one before again; `None` if the server ends before one can be loaded.
    fn load_newest<B: Backend + Clone, T: Element>(
        &mut self,
        backend: &B,
        positions: usize,
    ) -> Option<Model<B, T>> {
        loop {
            let newest = self.newest.load(Ordering::Relaxed);
            for source in [self.source.at(newest), self.source.clone()] {
                match load(&source, backend, positions) {
                    Ok((model, checkpoint)) => {
                        self.source = source;
                        self.tell(checkpoint, newest);
                        return Some(model);
                    }
                    Err(error) => exit::stderr_line(format_args!(
                        "warning: step {} cannot be served: {error:#}",
                        source.step().unwrap_or_default()
                    )),
                }
            }
            // A checkpoint that was removed meanwhile has a successor.
            std::thread::sleep(WATCH);
            self.served.upgrade()?;
        }
    }

    /// Says which checkpoint is served. If it is not the newest one, which could not be loaded then, that is not tried
    /// again; one that was written meanwhile is.
    fn tell(&self, checkpoint: Checkpoint, newest: u64) {
        if let Some(step) = checkpoint.step {
            exit::stderr_line(format_args!("serves step {step} now"));
            let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
            // An error says that there is a newer one.
            let _ = self.newest.compare_exchange(newest, step, success, failure);
        }
        if let Some(served) = self.served.upgrade() {
            served.set_checkpoint(checkpoint);
        }
    }
}

fn load<B: Backend + Clone, T: Element>(
    source: &Source,
    backend: &B,
    positions: usize,
) -> anyhow::Result<(Model<B, T>, Checkpoint)> {
    let checkpoint = checkpoint(source, &source.config()?);
    Ok((source.load(backend.clone(), positions)?, checkpoint))
}

/// The sizes of the cache and of passes.
fn cache_options<B: Backend, T: Element>(
    arguments: &Arguments,
    config: &ModelConfig,
    model: &Model<B, T>,
) -> anyhow::Result<BatchOptions> {
    let (context, block_length) = (model.positions(), arguments.block_size);
    let blocks_of = |tokens: usize| tokens.div_ceil(block_length);
    let bytes = 2 * config.num_hidden_layers * config.key_value_width() * size_of::<T>();
    let blocks = match arguments.kv_cache_tokens {
        Some(tokens) if blocks_of(tokens) < blocks_of(context) => bail!(
            "--kv-cache-tokens {tokens}: a sequence may need {context}: set --max-model-len lower, or this higher"
        ),
        Some(tokens) => blocks_of(tokens),
        None => {
            let most = blocks_of(context).saturating_mul(arguments.max_num_seqs);
            let available = match arguments.device {
                DeviceName::Cpu => {
                    available_memory().map_or(DEFAULT_CACHE_BYTES, |bytes| bytes / 4)
                }
                _ => DEFAULT_CACHE_BYTES,
            };
            let affordable = available / (bytes * block_length).max(1) as u64;
            let affordable = usize::try_from(affordable).unwrap_or(usize::MAX);
            affordable.clamp(blocks_of(context), most.max(blocks_of(context)))
        }
    };
    let tokens = blocks * block_length;
    exit::stderr_line(format_args!(
        "cache of {}, {:.2} GB",
        counted(tokens as u64, "token"),
        (bytes * tokens) as f64 / 1e9
    ));
    let pass_tokens = arguments.max_num_batched_tokens;
    let options = options::batch_options(model, tokens);
    Ok(BatchOptions { pass_tokens, blocks, block_length, independent: true, ..options })
}

/// Looks for other checkpoints as long as the program runs.
fn watch(source: &Source, newest: Arc<AtomicU64>) -> anyhow::Result<()> {
    let run = source.run()?.clone();
    std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
        let mut known = newest.load(Ordering::Relaxed);
        loop {
            std::thread::sleep(WATCH);
            // A directory that cannot be listed now may be later. The newest step may be an earlier one: a
            // run resumes from there with `--resume-step`.
            let last = run.checkpoint_steps().ok().and_then(|steps| steps.last().copied());
            if let Some(step) = last.filter(|&step| step != known) {
                known = step;
                newest.store(step, Ordering::Relaxed);
            }
        }
    })?;
    Ok(())
}

/// Starts to answer clients, on threads of their own.
fn start(
    served: Arc<Served>,
    guard: Guard,
    listener: TcpListener,
    max_connections: usize,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("clients")
        .enable_io()
        .enable_time()
        .build()?;
    let address = listener.local_addr()?;
    let app = api::routes(Arc::clone(&served))
        .merge(page::routes())
        .layer(axum::middleware::from_fn_with_state(guard, Guard::check));
    let (listener, signals) = {
        let _context = runtime.enter();
        (tokio::net::TcpListener::from_std(listener)?, Signals::new()?)
    };
    writeln!(stdout(), "{}", server::url(address))?;
    stdout().flush()?;
    std::thread::Builder::new().name("server".to_owned()).spawn(move || {
        runtime.block_on(async move {
            server::serve(listener, app, max_connections, signals.first(&served)).await;
        });
        runtime.shutdown_timeout(LAST_TASKS);
    })?;
    Ok(())
}

/// The signals that end the server.
struct Signals {
    #[cfg(unix)]
    signals: [tokio::signal::unix::Signal; 2],
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Signals {
            #[cfg(unix)]
            signals: {
                use tokio::signal::unix::{SignalKind, signal};
                [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]
            },
        })
    }

    /// Waits for the first one. A second one ends the program at once.
    async fn first(mut self, served: &Served) {
        self.next().await;
        served.is_ending.store(true, Ordering::Relaxed);
        exit::stderr_line(format_args!(
            "finishing the answers that were begun; again to end without them"
        ));
        tokio::spawn(async move {
            let signal = self.next().await;
            moh_files::exit_without_temporaries(128 + signal);
        });
    }

    #[cfg(unix)]
    async fn next(&mut self) -> i32 {
        let [interrupt, terminate] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => 2,
            _ = terminate.recv() => 15,
        }
    }

    #[cfg(not(unix))]
    async fn next(&mut self) -> i32 {
        // Without the handler nothing would end the program.
        let _ = tokio::signal::ctrl_c().await;
        2
    }
}
