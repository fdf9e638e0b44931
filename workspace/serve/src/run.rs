//! The server from its start to its end: the engine on this thread, the clients on others.

use std::io::{Write as _, stdout};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, bail};
use moh_checkpoint::run_directory::RunCheckpoint;
use moh_kernels::open_device::{DeviceName, OnDevice, available_memory};
use moh_kernels::{Backend, ElementType};
use moh_model::{BatchOptions, Model, ModelConfig};
use moh_program::models::{NamedModel, Place};
use moh_program::{counted, exit, options};
use moh_serve::api::{self, Checkpoint, LayerDescription, Served, TextLimits};
use moh_serve::engine::{Admission, Handle, Inbox, Limits, Scheduler, queue};
use moh_serve::guard::Guard;
use moh_serve::metrics::Metrics;
use moh_serve::{page, server};
use moh_text::{ChatTemplate, TextTokenizer};

use crate::arguments::Arguments;

/// The time that an idle engine waits before it looks for a newer checkpoint.
const IDLE: Duration = Duration::from_millis(100);
/// The time between two looks for a newer checkpoint.
const WATCH: Duration = Duration::from_secs(2);
/// Default bytes of the cache on a GPU, or if the available memory is unknown.
const DEFAULT_CACHE_BYTES: u64 = 4 << 30;
/// Most bytes of memory if the available memory is unknown.
const MAX_BYTES: u64 = 1 << 44;
/// The time that connections and unfinished templates have to end after a signal, once no sequence is computed.
const LAST_TASKS: Duration = Duration::from_secs(3);

/// A server that is about to start.
pub struct Serve<'a> {
    arguments: &'a Arguments,
    model: NamedModel,
    served: Arc<Served>,
    inbox: Inbox,
    guard: Guard,
    listener: TcpListener,
}

impl<'a> Serve<'a> {
    /// Reads everything except the weights, and binds the port.
    pub fn prepare(arguments: &'a Arguments) -> anyhow::Result<Self> {
        let model = NamedModel::open(&arguments.model, arguments.revision.as_deref())?;
        if arguments.watch_run && model.checkpoint().is_none() {
            bail!(
                "{}: is not a run, whose checkpoints --watch-run follows: leave it out",
                model.name
            );
        }
        let guard = arguments.guard()?;
        let (engine, inbox) = queue(arguments.max_queue);
        let served = Arc::new(describe(arguments, &model, engine)?);
        let listener = listen(SocketAddr::new(arguments.host, arguments.port))?;
        Ok(Serve { arguments, model, served, inbox, guard, listener })
    }
}

/// Describes the model for clients.
fn describe(arguments: &Arguments, model: &NamedModel, engine: Handle) -> anyhow::Result<Served> {
    let tokenizer = model.required_tokenizer()?;
    let config = &model.config;
    let positions = config.max_position_embeddings;
    let context = arguments.max_model_len.unwrap_or(positions);
    if context > positions {
        bail!("--max-model-len {context}: the model has {positions} positions");
    }
    let served = Served {
        name: arguments.served_model_name.clone().unwrap_or_else(|| arguments.model.clone()),
        end_tokens: moh_hf::end_tokens(&model.files(), config)?,
        template: template(&tokenizer)?,
        limits: TextLimits::new(&tokenizer, context),
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
    served.set_checkpoint(checkpoint(model));
    Ok(served)
}

fn checkpoint(model: &NamedModel) -> Checkpoint {
    let (config, heads) = (&model.config, model.config.num_attention_heads);
    let describe = |layer| {
        let of_layer = config.layer_heads(layer);
        let shared = (0..heads).filter(|&head| of_layer.shared.contains(head)).collect();
        LayerDescription { heads, active: of_layer.active(), shared }
    };
    let layers = (0..config.num_hidden_layers).map(describe).collect();
    Checkpoint { step: step(model), layers }
}

/// Returns the step of the checkpoint; `None` if the model is not a run's.
fn step(model: &NamedModel) -> Option<u64> {
    model.checkpoint().map(|checkpoint| checkpoint.step)
}

/// Returns the chat template, if the tokenizer has a template. Fails if the template is not Jinja.
fn template(tokenizer: &TextTokenizer) -> anyhow::Result<Option<ChatTemplate>> {
    let Some(template) = ChatTemplate::find(tokenizer)? else { return Ok(None) };
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

impl OnDevice for Serve<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Serve { arguments, model: named, served, inbox, guard, listener } = self;
        let (positions, metrics) = (served.context, Arc::clone(&served.metrics));
        let vocab_size = served.tokenizer.vocab_size();
        let element = named.element_type(arguments.dtype)?;
        let sizes = cache_sizes(arguments, &named.config, element, positions)?;
        let model: Model<B> = named.load(backend.clone(), element, positions)?;
        let tokens = sizes.blocks * sizes.block_length;
        let BatchOptions { pack_weights, .. } = options::batch_options(&model, tokens);
        let options = BatchOptions { pack_weights, ..sizes };
        let newest = Arc::new(AtomicU64::new(step(&named).unwrap_or_default()));
        if arguments.watch_run {
            watch(&named, Arc::clone(&newest))?;
        }
        let mut engine = Engine { named, inbox, newest, served: Arc::downgrade(&served) };
        start(served, guard, listener, arguments.max_connections)?;

        let limits = Limits {
            sequences: arguments.max_num_seqs,
            prompt_tokens: arguments.chunked_prefill_size,
        };
        let (mut waiting, mut loaded) = (Vec::new(), Some(model));
        loop {
            let Some(model) =
                loaded.take().or_else(|| engine.load_newest(&backend, element, positions))
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

/// The state of the engine's thread, except the model's weights.
struct Engine {
    /// The loaded model.
    named: NamedModel,
    inbox: Inbox,
    /// The step of the run's newest checkpoint.
    newest: Arc<AtomicU64>,
    /// The model as clients see it. Its last owner closes the queue, so the engine must not be an owner.
    served: Weak<Served>,
}

impl Engine {
    /// Returns whether the loaded checkpoint is the run's newest.
    fn is_current(&self) -> bool {
        step(&self.named).is_none_or(|step| step == self.newest.load(Ordering::Relaxed))
    }

    /// Computes until the queue is closed, and returns true. Returns false if there is another checkpoint.
    fn run<B: Backend>(&self, scheduler: &mut Scheduler<'_, B>) -> bool {
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

    /// Loads the newest checkpoint, or else the last checkpoint again. Returns `None` if the server ends before a
    /// checkpoint can be loaded.
    fn load_newest<B: Backend + Clone>(
        &mut self,
        backend: &B,
        element: ElementType,
        positions: usize,
    ) -> Option<Model<B>> {
        loop {
            let newest = self.newest.load(Ordering::Relaxed);
            let last = self.named.checkpoint()?.clone();
            for checkpoint in [RunCheckpoint { step: newest, ..last.clone() }, last] {
                let step = checkpoint.step;
                let named = NamedModel::at(&self.named.name, Place::Checkpoint(checkpoint));
                let loaded =
                    named.and_then(|it| Ok((it.load(backend.clone(), element, positions)?, it)));
                match loaded {
                    Ok((model, named)) => {
                        self.named = named;
                        self.tell(newest);
                        return Some(model);
                    }
                    Err(error) => exit::stderr_line(format_args!(
                        "warning: step {step} cannot be served: {error:#}"
                    )),
                }
            }
            // If a checkpoint was removed meanwhile, it has a successor.
            std::thread::sleep(WATCH);
            self.served.upgrade()?;
        }
    }

    /// Publishes the step that is served. A newest checkpoint that failed to load is not retried; a newer one is.
    fn tell(&self, newest: u64) {
        if let Some(step) = step(&self.named) {
            exit::stderr_line(format_args!("serves step {step} now"));
            let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
            // An error means that there is a newer checkpoint.
            let _ = self.newest.compare_exchange(newest, step, success, failure);
        }
        if let Some(served) = self.served.upgrade() {
            served.set_checkpoint(checkpoint(&self.named));
        }
    }
}

/// Returns the sizes of the cache and of passes. Fails if they exceed the memory.
fn cache_sizes(
    arguments: &Arguments,
    config: &ModelConfig,
    element: ElementType,
    context: usize,
) -> anyhow::Result<BatchOptions> {
    let (block_length, pass_tokens) = (arguments.block_size, arguments.max_num_batched_tokens);
    let blocks_of = |tokens: usize| tokens.div_ceil(block_length);
    let bytes = 2 * config.num_hidden_layers * config.key_value_width() * element.bytes();
    let on_host = arguments.device == DeviceName::Cpu;
    let available = available_memory().filter(|_| on_host);
    let blocks = match arguments.kv_cache_tokens {
        Some(tokens) if blocks_of(tokens) < blocks_of(context) => bail!(
            "--kv-cache-tokens {tokens}: a sequence may need {context}: set --max-model-len lower, or this higher"
        ),
        Some(tokens) => blocks_of(tokens),
        None => {
            let most = blocks_of(context).saturating_mul(arguments.max_num_seqs);
            let available = available.map_or(DEFAULT_CACHE_BYTES, |bytes| bytes / 4);
            let affordable = available / (bytes * block_length).max(1) as u64;
            let affordable = usize::try_from(affordable).unwrap_or(usize::MAX);
            affordable.clamp(blocks_of(context), most.max(blocks_of(context)))
        }
    };
    let product = |factors: [usize; 3]| factors.iter().map(|&it| it as u128).product::<u128>();
    let cache = product([blocks, block_length, bytes]);
    let attention = config.num_attention_heads * config.head_dim;
    let row = 6 * config.hidden_size + 3 * config.intermediate_size + 4 * attention;
    let context_option = format!("--max-model-len {context}");
    let cache_option = match arguments.kv_cache_tokens {
        Some(tokens) => format!("--kv-cache-tokens {tokens}"),
        None if block_length > context => format!("--block-size {block_length}"),
        None => context_option.clone(),
    };
    // The cosines and sines of every position, the cache, and the approximate rows of a pass.
    for (option, needed) in [
        (context_option, product([context, config.head_dim, size_of::<f32>()])),
        (cache_option, cache),
        (
            format!("--max-num-batched-tokens {pass_tokens}"),
            product([pass_tokens, row, element.bytes()])
                + product([pass_tokens, blocks_of(context).min(blocks), size_of::<u32>()]),
        ),
    ] {
        let most = available.unwrap_or(MAX_BYTES);
        if needed > u128::from(most) {
            let (needed, most) = (needed as f64 / 1e9, most as f64 / 1e9);
            bail!(
                "{option}: needs {needed:.1} GB of memory, and {most:.1} GB are available: set it lower"
            );
        }
    }
    exit::stderr_line(format_args!(
        "{}, {} of {} heads active, a cache of {}, {:.2} GB (--kv-cache-tokens)",
        element.name(),
        config.active_heads(),
        config.num_attention_heads,
        counted((blocks * block_length) as u64, "token"),
        cache as f64 / 1e9
    ));
    let sizes = BatchOptions::for_tokens(block_length);
    Ok(BatchOptions { pass_tokens, blocks, block_length, independent: true, ..sizes })
}

/// Starts to look for other checkpoints, as long as the program runs.
fn watch(model: &NamedModel, newest: Arc<AtomicU64>) -> anyhow::Result<()> {
    let Some(RunCheckpoint { run, .. }) = model.checkpoint().cloned() else { return Ok(()) };
    std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
        let mut known = newest.load(Ordering::Relaxed);
        loop {
            std::thread::sleep(WATCH);
            // If the directory cannot be listed, the next look retries. The newest step may be an earlier step: a run
            // resumes from there with `--resume-step`.
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
        .thread_name("clients")
        .enable_io()
        .enable_time()
        .build()?;
    let address = listener.local_addr()?;
    let app = api::routes(Arc::clone(&served), page::routes())
        .layer(axum::middleware::from_fn_with_state(Arc::new(guard), Guard::check));
    let listener = {
        let _context = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    let (stop, stopped) = tokio::sync::oneshot::channel();
    exit::at_first_signal(move |_| {
        served.is_ending.store(true, Ordering::Relaxed);
        exit::stderr_line(format_args!(
            "finishing the answers that were begun; again to end without them"
        ));
        // Before the engine's queue loses its last handle.
        let active = Arc::clone(&served.engine.active);
        let _ = std::thread::Builder::new().spawn(move || end_when_idle(&active));
        let _ = stop.send(());
    })?;
    writeln!(stdout(), "http://{address}/")?;
    stdout().flush()?;
    std::thread::Builder::new().name("server".to_owned()).spawn(move || {
        runtime.block_on(server::serve(listener, app, max_connections, async {
            let _ = stopped.await;
        }));
        runtime.shutdown_timeout(LAST_TASKS);
    })?;
    Ok(())
}

/// Ends the program some seconds after the last sequence, even if connections and tasks still wait.
fn end_when_idle(active: &AtomicUsize) {
    let mut last = Instant::now();
    while last.elapsed() < LAST_TASKS {
        std::thread::sleep(Duration::from_millis(50));
        if active.load(Ordering::Relaxed) > 0 {
            last = Instant::now();
        }
    }
    moh_files::exit_without_temporaries(0);
}
