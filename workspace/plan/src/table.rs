//! A plan as text: tables with a label, then a column for each stage.

use std::fmt;

use moh_files::units::{bytes, counted, duration, flops, group_digits, moment, percent, traffic};
use moh_kernels::{ElementType, Purpose};
use moh_model::Recompute;
use moh_recipe::DeviceKind;

use super::calibration::CalibrationCost;
use super::cluster::{Cluster, ClusterStage, PredictedSpeed};
use super::layouts::StageSuggestions;
use super::{DiskBytes, Plan, StagePlan};
use crate::{Basis, Hardware, RankMemory, Rate, SourceEpochs, Suggestions};

/// Width of a row's label.
const LABEL: usize = 40;
const COLUMN: usize = 18;

type Value<T> = fn(&T) -> String;

/// Writes a table: a label, then a column for each stage.
struct Table<'a, 'f> {
    f: &'a mut fmt::Formatter<'f>,
    columns: Vec<usize>,
}

impl Table<'_, '_> {
    fn title(&mut self, title: &str) -> fmt::Result {
        writeln!(self.f, "\n{title}")
    }

    fn one(&mut self, label: &str, value: &str) -> fmt::Result {
        writeln!(self.f, "  {label:<LABEL$}{value:>COLUMN$}")
    }

    /// Writes a row with one value per stage.
    fn each<T>(
        &mut self,
        label: &str,
        stages: impl IntoIterator<Item = T>,
        value: impl Fn(T) -> String,
    ) -> fmt::Result {
        self.row(label, stages.into_iter().map(value), "")
    }

    fn row(&mut self, label: &str, cells: impl Iterator<Item = String>, end: &str) -> fmt::Result {
        let cells = cells.zip(&self.columns).map(|(cell, width)| format!("{cell:>width$}"));
        writeln!(self.f, "  {label:<LABEL$}{}{end}", cells.collect::<String>())
    }

    /// Writes a row of bytes, if a stage has any.
    fn bytes(
        &mut self,
        label: &str,
        stages: &[RankMemory],
        value: impl Fn(&RankMemory) -> u64,
    ) -> fmt::Result {
        match stages.iter().any(|stage| value(stage) > 0) {
            true => self.each(label, stages, |stage| bytes(value(stage))),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.stages.iter().map(|stage| COLUMN.max(stage.name.len() + 2)).collect();
        let mut table = Table { f, columns };
        self.write_model(&mut table)?;
        self.write_stages(&mut table)?;
        self.write_sources(&mut table)?;
        self.write_operations(&mut table)?;
        match &self.cluster {
            None => {
                table.title("Memory of one process that holds the whole model")?;
                let memory: Vec<_> = self.stages.iter().map(|stage| stage.memory).collect();
                self.write_memory(&mut table, &memory)?;
            }
            Some(cluster) => self.write_cluster(&mut table, cluster)?,
        }
        self.write_disk(&mut table)
    }
}

impl Plan {
    fn write_model(&self, table: &mut Table) -> fmt::Result {
        writeln!(table.f, "Model")?;
        table.one("parameters", &group_digits(self.parameters.0))?;
        let (before, after) = self.vocabulary;
        if before == after {
            return table.one("vocabulary", &group_digits(before as u64));
        }
        let growth = format!("{} -> {}", group_digits(before as u64), group_digits(after as u64));
        table.one("vocabulary", &growth)?;
        table.one("parameters after its growth", &group_digits(self.parameters.1))
    }

    fn write_stages(&self, table: &mut Table) -> fmt::Result {
        let stages = &self.stages;
        table.title("Stages")?;
        table.each("", stages, |stage| stage.name.clone())?;
        table.each("attention", stages, |stage| match stage.moh {
            Some(_) => format!("{} of {} heads", stage.active_heads, stage.num_heads),
            None => "dense".to_string(),
        })?;
        if stages.iter().any(|stage| stage.teacher.is_some()) {
            let teacher =
                |stage: &StagePlan| stage.teacher.clone().unwrap_or_else(|| "none".into());
            table.each("teacher", stages, teacher)?;
        }
        table.each("steps", stages, |stage| group_digits(stage.steps))?;
        table.each("tokens per step", stages, |stage| group_digits(stage.batch_tokens))?;
        table.each("tokens", stages, |stage| group_digits(stage.tokens))?;
        if stages.iter().any(|stage| stage.sequence_length != stages[0].sequence_length) {
            table.each("tokens per sequence", stages, |stage| {
                group_digits(stage.sequence_length as u64)
            })?;
        }
        table.each("sequences", stages, |stage| group_digits(stage.samples))?;
        table.each("micro-batches per step", stages, |stage| group_digits(stage.micro_batches))?;
        table.each("tensor x pipeline parallel", stages, |stage| {
            format!("{} x {}", stage.parallel.tensor, stage.parallel.pipeline)
        })
    }

    fn write_sources(&self, table: &mut Table) -> fmt::Result {
        table.title("Token files, over all stages")?;
        let Some(sources) = &self.sources else {
            return writeln!(
                table.f,
                "  epochs: not known, not all files of data.sources are on this machine"
            );
        };
        for source in sources {
            let SourceEpochs { path, tokens_drawn, tokens, epochs } = source;
            table.one(&path.display().to_string(), &format!("{epochs:.2} epochs"))?;
            let drawn = format!("{} of {}", group_digits(*tokens_drawn), group_digits(*tokens));
            table.one("  tokens drawn, of the file's", &drawn)?;
            if source.repeats() {
                writeln!(table.f, "  warning: {}", source.warning())?;
            }
        }
        Ok(())
    }

    fn write_operations(&self, table: &mut Table) -> fmt::Result {
        let stages = &self.stages;
        table.title(
            "Operations (a multiply-add is 2; causal half of attention; training is forward and \
             backward)",
        )?;
        table.each("forward, per token", stages, |s| flops(s.forward_flops))?;
        table.each("training, per token", stages, |s| flops(s.training_flops))?;
        table.each("training, per token, if dense", stages, |s| flops(s.dense_training_flops))?;
        table.each("training, whole stage", stages, |s| flops(s.total_flops()))?;
        let Some(Rate { value, basis }) = self.device_tflops else { return Ok(()) };
        let rate = value * 1e12;
        table.title(&match basis {
            Basis::Measured => format!(
                "Time on this processor if steps reach the rate of its matrix products, {value:.3} TFLOP/s, measured"
            ),
            _ => format!("Time on one device that achieves {value} TFLOP/s, assumed"),
        })?;
        table
            .each("tokens/s", stages, |stage| group_digits((rate / stage.training_flops) as u64))?;
        table.each("time", stages, |stage| duration(stage.total_flops() / rate))?;
        let all: f64 = stages.iter().map(StagePlan::total_flops).sum();
        table.one("all stages", &duration(all / rate))
    }

    fn write_memory(&self, table: &mut Table, stages: &[RankMemory]) -> fmt::Result {
        let (gradients, moments) = self.state_dtypes;
        let of = |what: &str, dtype: ElementType| format!("{what}, {}", dtype.name());
        let recompute = match self.recompute {
            Recompute::None => "none",
            Recompute::Norms => "cheap",
            Recompute::Block => "block",
        };
        let staging = |rank: &RankMemory| rank.staging;
        table.bytes(&of("weights", self.dtype), stages, |rank| rank.bytes(Purpose::Weights))?;
        table.bytes("remainders, 16 bits", stages, |rank| rank.bytes(Purpose::Remainders))?;
        table.bytes(&of("gradients", gradients), stages, |rank| rank.bytes(Purpose::Gradients))?;
        table.bytes("rounded gradients, bf16", stages, |rank| {
            rank.bytes(Purpose::RoundedGradients)
        })?;
        table.bytes(&of("moments", moments), stages, |rank| rank.bytes(Purpose::Moments))?;
        table.bytes("teacher, with its passes", stages, |rank| rank.bytes(Purpose::Teacher))?;
        let label = format!("activations, recompute {recompute}");
        table.bytes(&label, stages, |rank| rank.bytes(Purpose::Activations))?;
        let label = "gradients of one block's activations";
        table.bytes(label, stages, |rank| rank.bytes(Purpose::ActivationGradients))?;
        table.bytes("gathered activations", stages, |rank| rank.bytes(Purpose::Gathered))?;
        table.bytes("logits, one chunk", stages, |rank| rank.bytes(Purpose::Logits))?;
        table.bytes("validation loss", stages, |rank| rank.bytes(Purpose::Evaluation))?;
        table.bytes("scratch of attention and others", stages, |rank| {
            rank.bytes(Purpose::Scratch)
        })?;
        table.bytes("tables and sums", stages, |rank| rank.bytes(Purpose::Other))?;
        table.bytes("messages between stages", stages, |rank| rank.messages)?;
        table.bytes("scratch of threads", stages, |rank| rank.thread_scratch)?;
        table.bytes("driver and libraries, estimated", stages, |rank| rank.libraries)?;
        if stages.iter().any(|rank| rank.device == DeviceKind::Cuda) {
            table.bytes("sum", stages, RankMemory::total)?;
            return table.bytes("of the host: copy for checkpoints", stages, staging);
        }
        table.bytes("copy for checkpoints", stages, staging)?;
        table.bytes("sum", stages, RankMemory::total)
    }

    fn write_cluster(&self, table: &mut Table, cluster: &Cluster) -> fmt::Result {
        let stages = &cluster.stages;
        write_layouts(table, cluster)?;
        table.title("Memory of the rank that has most to hold")?;
        table.each("rank of the pipeline, from 0", stages, |stage| {
            stage.memory.pipeline_rank.to_string()
        })?;
        table.each("passes in flight", stages, |stage| group_digits(stage.memory.in_flight))?;
        let memory: Vec<_> = stages.iter().map(|stage| stage.memory).collect();
        self.write_memory(table, &memory)?;
        if let Some(hardware) = &cluster.hardware {
            self.write_fit(table, &memory, hardware)?;
        }
        write_traffic(table, stages)?;
        if let Some(hardware) = &cluster.hardware {
            let speeds: Vec<PredictedSpeed> =
                stages.iter().filter_map(|stage| stage.speed).collect();
            self.write_times(table, &speeds, hardware, cluster.ranks)?;
            write_checkpoint(table, cluster.checkpoint_seconds, hardware)?;
            table.title("Rates of the profile")?;
            write_rates(table.f, hardware)?;
        }
        Ok(())
    }

    fn write_times(
        &self,
        table: &mut Table,
        stages: &[PredictedSpeed],
        hardware: &Hardware,
        ranks: usize,
    ) -> fmt::Result {
        let (compute, network) =
            (hardware.compute_basis(self.dtype), hardware.network_basis(ranks));
        let (data, all) = (network.max(hardware.network.data_overlap.basis), compute.max(network));
        let memory = hardware.device.memory_gb_per_s.basis;
        let step = all.max(data);
        let (stage, of_run) = match hardware.checkpoint_basis() {
            Some(checkpoint) => ("stage, with its checkpoints", step.max(checkpoint)),
            None => ("stage, without its checkpoints", step),
        };
        table
            .title(&format!("Predicted time on {}, and how its rates are known", hardware.name))?;
        let rows: [(&str, Basis, Value<PredictedSpeed>); 11] = [
            ("compute", compute, |s| moment(s.step.compute)),
            ("tensor ranks' exchange", network, |s| moment(s.step.tensor)),
            ("sends in the pipeline", network, |s| moment(s.step.sends)),
            ("pipeline bubble", all, |s| moment(s.step.bubble)),
            ("data ranks' exchange, as far as exposed", data, |s| moment(s.step.data)),
            ("optimiser", memory, |s| moment(s.step.optimizer)),
            ("step", step, |s| moment(s.step.total())),
            ("bubble's share of the step", step, |s| percent(s.step.bubble / s.step.total())),
            ("tokens/s", step, |s| group_digits(s.tokens_per_second as u64)),
            ("share of the matrix products' rate", step, |s| percent(s.matmul_share)),
            (stage, of_run, |s| duration(s.stage)),
        ];
        for (label, basis, value) in rows {
            table.row(label, stages.iter().map(value), &known(basis))?;
        }
        let run = duration(stages.iter().map(|s| s.stage).sum());
        table.row("all stages", std::iter::once(run), &known(of_run))
    }

    fn write_fit(
        &self,
        table: &mut Table,
        memory: &[RankMemory],
        hardware: &Hardware,
    ) -> fmt::Result {
        let usable = hardware.usable_bytes();
        let label = format!("share of the {} that a rank has", bytes(usable));
        table.each(&label, memory, |rank| percent(rank.total() as f64 / usable as f64))?;
        for (stage, rank) in self.stages.iter().zip(memory) {
            let total = rank.total();
            if total > usable {
                writeln!(
                    table.f,
                    "  stage {} DOES NOT FIT: {} are missing; --suggest shows layouts that fit, \
                     memory.recompute=block and bf16 gradients need less",
                    stage.name,
                    bytes(total - usable)
                )?;
            }
        }
        Ok(())
    }

    fn write_calibrations(&self, table: &mut Table) -> fmt::Result {
        if self.stages.iter().all(|stage| stage.calibration.is_none()) {
            return Ok(());
        }
        table.title("Calibration before a stage's first step, on the first rank")?;
        let rows: [(&str, Value<CalibrationCost>); 4] = [
            ("tokens", |cost| group_digits(cost.tokens)),
            ("operations", |cost| flops(cost.flops)),
            ("memory of the device, beside the state", |cost| bytes(cost.device_bytes)),
            ("memory of the host", |cost| bytes(cost.host_bytes)),
        ];
        for (label, value) in rows {
            table.each(label, &self.stages, |stage| {
                stage.calibration.as_ref().map_or("none".to_owned(), value)
            })?;
        }
        let Some(Rate { value, basis: Basis::Measured }) = self.device_tflops else {
            return Ok(());
        };
        table.each("time, with fits more", &self.stages, |stage| {
            let cost = stage.calibration.as_ref();
            cost.map_or("none".to_owned(), |cost| duration(cost.flops / (value * 1e12)))
        })
    }

    fn write_disk(&self, table: &mut Table) -> fmt::Result {
        self.write_calibrations(table)?;
        table.title("Disk")?;
        let DiskBytes { checkpoint, num_checkpoints, export } = self.disk;
        table.one("one checkpoint", &bytes(checkpoint))?;
        let kept = format!("checkpoints kept, at most {}", group_digits(num_checkpoints));
        table.one(&kept, &bytes(checkpoint.saturating_mul(num_checkpoints)))?;
        table.one("exported model", &bytes(export))
    }
}

fn write_layouts(table: &mut Table, cluster: &Cluster) -> fmt::Result {
    let stages = &cluster.stages;
    table.title(&format!("Layout of {}", counted(cluster.ranks as u64, "rank")))?;
    table.each("tensor x data x pipeline", stages, |stage| stage.layout.to_string())?;
    table.each("virtual stages of each rank", stages, |stage| {
        stage.layout.virtual_stages.to_string()
    })?;
    table.each("micro-batches per step and data rank", stages, |stage| {
        group_digits(stage.micro_batches)
    })?;
    if stages.iter().any(|stage| stage.idle_data_ranks > 0) {
        table
            .each("data ranks WITHOUT WORK", stages, |stage| group_digits(stage.idle_data_ranks))?;
    }
    Ok(())
}

fn write_traffic(table: &mut Table, stages: &[ClusterStage]) -> fmt::Result {
    table.title("Sent by one rank in a step, which receives as much")?;
    table.each("data: gradients and weights", stages, |stage| traffic(stage.traffic.data.bytes))?;
    table.each("tensor: activations", stages, |stage| traffic(stage.traffic.tensor.bytes))?;
    table.each("pipeline: activations", stages, |stage| traffic(stage.traffic.pipeline.bytes))?;
    table.each("sum", stages, |stage| traffic(stage.traffic.bytes()))
}

fn write_checkpoint(table: &mut Table, seconds: Option<f64>, hardware: &Hardware) -> fmt::Result {
    let label = "hashing and writing one checkpoint";
    match (seconds, hardware.checkpoint_basis()) {
        (Some(seconds), Some(basis)) => {
            table.row(label, std::iter::once(duration(seconds)), &known(basis))
        }
        _ => writeln!(
            table.f,
            "  {label}: not known; set node.filesystem_write_gb_per_s and node.hash_gb_per_s in the \
             profile"
        ),
    }
}

/// Returns the end of a row that rests on rates: their basis.
fn known(basis: Basis) -> String {
    format!("  {}", basis.name())
}

fn write_rates(f: &mut fmt::Formatter<'_>, hardware: &Hardware) -> fmt::Result {
    for (name, Rate { value, basis }, unit) in hardware.rates() {
        writeln!(f, "  {name:<LABEL$}{:>COLUMN$}{}", format!("{value} {unit}"), known(basis))?;
    }
    Ok(())
}

impl fmt::Display for Suggestions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = counted(self.ranks as u64, "rank");
        writeln!(f, "Layouts of {ranks} on {}, fastest first", self.hardware.name)?;
        for stage in &self.stages {
            writeln!(f)?;
            write_suggestions(f, stage, &self.hardware)?;
        }
        writeln!(f, "\nRates of the profile")?;
        write_rates(f, &self.hardware)
    }
}

fn write_suggestions(
    f: &mut fmt::Formatter<'_>,
    stage: &StageSuggestions,
    hardware: &Hardware,
) -> fmt::Result {
    let StageSuggestions { stage: name, considered, fitting, least_bytes, best } = stage;
    writeln!(f, "Stage {name}: {fitting} of {considered} layouts fit in memory and leave 8% free")?;
    if best.is_empty() {
        let least = match least_bytes {
            Some(least) => format!("the smallest needs {} a rank", bytes(*least)),
            None => "no layout gives every rank work".to_string(),
        };
        return writeln!(
            f,
            "  {least}, and a rank may use {}: use another number of ranks, memory.recompute=block or \
             bf16 gradients",
            bytes(hardware.suggested_bytes())
        );
    }
    writeln!(
        f,
        "     tensor x data x pipeline  virtual  micro_batch        step      tokens/s    bubble  \
         matmul      memory"
    )?;
    for (index, one) in best.iter().enumerate() {
        let divided = one.layout.to_string();
        let PredictedSpeed { step, tokens_per_second, matmul_share, .. } = one.speed;
        writeln!(
            f,
            "  {}. {divided:>24}  {:>7}  {:>11}  {:>10}  {:>12}  {:>8}  {:>6}  {:>10}",
            index + 1,
            one.layout.virtual_stages,
            one.micro_batch,
            moment(step.total()),
            group_digits(tokens_per_second as u64),
            percent(step.bubble / step.total()),
            percent(matmul_share),
            bytes(one.bytes),
        )?;
    }
    for (index, one) in best.iter().enumerate() {
        writeln!(f, "  {}. {}", index + 1, one.overrides(name))?;
    }
    Ok(())
}
