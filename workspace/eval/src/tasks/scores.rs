//! The metrics of a task, of the names and definitions of lm-evaluation-harness, but for the
//! perplexities by word and byte: the harness has them for whole documents, and here they are those
//! of the answers.

use serde_json::{Map, Value, json};

use super::{Example, LogLikelihood, TaskFile, TaskKind};
use crate::Error;

/// A metric over examples, and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The metric.
    pub value: f64,
    /// Its standard error; `None` if one example has none, or if the metric has none.
    pub stderr: Option<f64>,
}

impl Estimate {
    /// The mean, and the sample's standard deviation by the root of their number.
    fn mean(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let stderr = (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
        Estimate { value: mean, stderr }
    }
}

/// What the model answers to an example.
#[derive(Debug, Clone, PartialEq)]
pub enum ExampleOutcome {
    /// To a question with several choices.
    MultipleChoice {
        /// Of each choice, in nats.
        log_likelihoods: Vec<f64>,
        /// The choice of the largest log-likelihood; the first of several.
        predicted: usize,
        /// As `predicted`, of log-likelihoods divided by the characters of the choice.
        predicted_norm: usize,
        /// As `predicted`, of log-likelihoods divided by the bytes of the choice.
        predicted_bytes: usize,
        /// The right choice.
        answer: usize,
    },
    /// To a cloze.
    Cloze {
        /// Of the answer, in nats.
        log_likelihood: f64,
        /// Whether each of its tokens is the most likely one.
        is_greedy: bool,
        /// Words and bytes of the answer.
        size: (usize, usize),
    },
}

impl ExampleOutcome {
    /// The outcome of an example of kind `kind` whose choices have these log-likelihoods.
    fn new(kind: TaskKind, example: &Example, found: &[LogLikelihood]) -> Self {
        match kind {
            TaskKind::MultipleChoice => {
                let log_likelihoods: Vec<f64> = found.iter().map(|found| found.sum).collect();
                let by = |size: fn(&String) -> usize| {
                    let choices = log_likelihoods.iter().zip(&example.choices);
                    largest(choices.map(|(sum, choice)| sum / size(choice) as f64))
                };
                ExampleOutcome::MultipleChoice {
                    predicted: by(|_| 1),
                    predicted_norm: by(|choice| choice.chars().count()),
                    predicted_bytes: by(String::len),
                    answer: example.answer,
                    log_likelihoods,
                }
            }
            TaskKind::Cloze => {
                let answer = &example.choices[0];
                ExampleOutcome::Cloze {
                    log_likelihood: found[0].sum,
                    is_greedy: found[0].is_greedy,
                    size: (answer.split_whitespace().count().max(1), answer.len()),
                }
            }
        }
    }

    /// The outcomes of the examples of a file, from the log-likelihoods of all their choices.
    ///
    /// # Errors
    /// Fails if a log-likelihood is not a finite number.
    pub fn of_file(file: &TaskFile, found: &[LogLikelihood]) -> Result<Vec<Self>, Error> {
        let mut rest = found;
        let mut outcomes = Vec::with_capacity(file.examples.len());
        for example in &file.examples {
            let (of_example, later) = rest.split_at(example.choices.len());
            rest = later;
            if let Some(sum) = of_example.iter().map(|found| found.sum).find(|s| !s.is_finite()) {
                let (path, line) = (file.path.clone(), example.line);
                let reason =
                    format!("the model gives the log-likelihood {sum}: its weights are damaged");
                return Err(moh_data::Error::Line { path, line, reason }.into());
            }
            outcomes.push(ExampleOutcome::new(file.kind, example, of_example));
        }
        Ok(outcomes)
    }

    /// Whether the answer is right, `acc`.
    pub fn is_right(&self) -> bool {
        match *self {
            ExampleOutcome::MultipleChoice { predicted, answer, .. } => predicted == answer,
            ExampleOutcome::Cloze { is_greedy, .. } => is_greedy,
        }
    }

    /// The outcome as a line of JSON: of line `line` of the file `file`.
    pub fn to_json(&self, file: &str, line: u64) -> Value {
        match self {
            ExampleOutcome::MultipleChoice {
                log_likelihoods,
                predicted,
                predicted_norm,
                predicted_bytes,
                answer,
            } => json!({
                "file": file, "line": line, "log_likelihoods": log_likelihoods,
                "predicted": predicted, "predicted_norm": predicted_norm,
                "predicted_bytes": predicted_bytes, "answer": answer, "right": self.is_right(),
            }),
            ExampleOutcome::Cloze { log_likelihood, .. } => json!({
                "file": file, "line": line, "log_likelihood": log_likelihood,
                "right": self.is_right(),
            }),
        }
    }
}

/// The first of the largest values, as numpy's `argmax`.
fn largest(values: impl Iterator<Item = f64>) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (index, value) in values.enumerate() {
        if value > best.1 {
            best = (index, value);
        }
    }
    best.0
}

/// The metrics of a task, by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores(pub Vec<(&'static str, Estimate)>);

impl Scores {
    /// The metrics of the outcomes of a file.
    pub fn new(outcomes: &[ExampleOutcome]) -> Self {
        let share = |right: fn(&ExampleOutcome) -> bool| {
            let values: Vec<f64> = outcomes.iter().map(|o| f64::from(u8::from(right(o)))).collect();
            Estimate::mean(&values)
        };
        let mut scores = vec![("acc", share(ExampleOutcome::is_right))];
        let (mut sums, mut words, mut bytes) = (Vec::new(), 0, 0);
        for outcome in outcomes {
            if let ExampleOutcome::Cloze { log_likelihood, size, .. } = outcome {
                sums.push(*log_likelihood);
                words += size.0;
                bytes += size.1;
            }
        }
        if sums.is_empty() {
            let by_characters = |outcome: &ExampleOutcome| match outcome {
                ExampleOutcome::MultipleChoice { predicted_norm, answer, .. } => {
                    predicted_norm == answer
                }
                ExampleOutcome::Cloze { .. } => false,
            };
            let by_bytes = |outcome: &ExampleOutcome| match outcome {
                ExampleOutcome::MultipleChoice { predicted_bytes, answer, .. } => {
                    predicted_bytes == answer
                }
                ExampleOutcome::Cloze { .. } => false,
            };
            scores.push(("acc_norm", share(by_characters)));
            scores.push(("acc_bytes", share(by_bytes)));
        } else {
            let total: f64 = sums.iter().sum();
            let per =
                |count: usize| Estimate { value: (-total / count as f64).exp(), stderr: None };
            scores.push(("perplexity", perplexity(&sums)));
            scores.push(("word_perplexity", per(words)));
            scores.push(("byte_perplexity", per(bytes)));
        }
        Scores(scores)
    }

    /// The metrics as fields `NAME` and `NAME_stderr`, null where there is none.
    pub fn to_json(&self) -> Map<String, Value> {
        let fields = self.0.iter().flat_map(|(name, estimate)| {
            [
                ((*name).to_owned(), json!(estimate.value)),
                (format!("{name}_stderr"), json!(estimate.stderr)),
            ]
        });
        fields.collect()
    }
}

/// The perplexity of answers. Its error is that of the mean log-likelihood times the derivative,
/// which lm-evaluation-harness estimates by drawing samples.
fn perplexity(sums: &[f64]) -> Estimate {
    let mean = Estimate::mean(sums);
    let value = (-mean.value).exp();
    Estimate { value, stderr: mean.stderr.map(|stderr| value * stderr) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(choices: &[&str], sums: &[f64], answer: usize) -> ExampleOutcome {
        let choices = choices.iter().map(|choice| (*choice).to_owned()).collect();
        let (context, delimiter) = (String::new(), String::new());
        let example = Example { line: 1, context, delimiter, choices, answer };
        let found = sums.iter().map(|&sum| LogLikelihood { sum, is_greedy: false });
        ExampleOutcome::new(TaskKind::MultipleChoice, &example, &found.collect::<Vec<_>>())
    }

    fn cloze(answer: &str, sum: f64, is_greedy: bool) -> ExampleOutcome {
        let example = Example {
            line: 1,
            context: String::new(),
            delimiter: String::new(),
            choices: vec![answer.to_owned()],
            answer: 0,
        };
        ExampleOutcome::new(TaskKind::Cloze, &example, &[LogLikelihood { sum, is_greedy }])
    }

    fn value(scores: &Scores, name: &str) -> Estimate {
        scores.0.iter().find(|(found, _)| *found == name).unwrap().1
    }

    #[test]
    fn choices_are_compared_by_sum_by_characters_and_by_bytes() {
        // Sums by characters: -2, -1.5, -1; by bytes: -1, -1.5, -1: the first of equal ones.
        let outcome = choices(&["\u{e4}", "bb", "cccc"], &[-2.0, -3.0, -4.0], 2);
        let ExampleOutcome::MultipleChoice { predicted, predicted_norm, predicted_bytes, .. } =
            outcome
        else {
            panic!("{outcome:?}")
        };
        assert_eq!((predicted, predicted_norm, predicted_bytes), (0, 2, 0));
        assert!(!outcome.is_right());
        let scores = Scores::new(&[outcome, choices(&["a", "b"], &[-1.0, -1.0], 0)]);
        let names: Vec<_> = scores.0.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["acc", "acc_norm", "acc_bytes"]);
        assert_eq!(value(&scores, "acc").value, 0.5);
        // numpy.std([0, 1], ddof=1) / 2 ** 0.5 == 0.5
        assert_eq!(value(&scores, "acc").stderr, Some(0.5));
        assert_eq!(value(&scores, "acc_norm"), Estimate { value: 1.0, stderr: Some(0.0) });
        assert_eq!(value(&scores, "acc_bytes").value, 0.5);
    }

    #[test]
    fn perplexities_are_by_answer_by_word_and_by_byte() {
        let scores = Scores::new(&[cloze("ab cd", -3.0, true), cloze("efg", -1.0, false)]);
        assert_eq!(value(&scores, "acc").value, 0.5);
        let perplexity = value(&scores, "perplexity");
        assert!((perplexity.value - 2f64.exp()).abs() < 1e-12);
        // The mean of -3 and -1 has the standard error 1.
        assert!((perplexity.stderr.unwrap() - 2f64.exp()).abs() < 1e-12);
        assert!((value(&scores, "word_perplexity").value - (4.0f64 / 3.0).exp()).abs() < 1e-12);
        assert!((value(&scores, "byte_perplexity").value - 0.5f64.exp()).abs() < 1e-12);
        let json = scores.to_json();
        assert_eq!(json["word_perplexity_stderr"], Value::Null);
        assert_eq!(json["acc"], 0.5);
    }

    #[test]
    fn one_example_has_no_standard_error() {
        let scores = Scores::new(&[cloze("a", -1.0, true)]);
        assert_eq!(value(&scores, "acc"), Estimate { value: 1.0, stderr: None });
        assert_eq!(value(&scores, "perplexity").stderr, None);
    }

    #[test]
    fn damaged_weights_are_told_from_bad_answers() {
        let example = Example {
            line: 4,
            context: String::new(),
            delimiter: String::new(),
            choices: vec!["a".to_owned()],
            answer: 0,
        };
        let file =
            TaskFile { path: "t.jsonl".into(), kind: TaskKind::Cloze, examples: vec![example] };
        let found = [LogLikelihood { sum: f64::NAN, is_greedy: false }];
        let error = ExampleOutcome::of_file(&file, &found).unwrap_err().to_string();
        assert!(error.starts_with("t.jsonl:4: the model gives the log-likelihood NaN"));
    }

    #[test]
    fn outcomes_are_lines_of_json() {
        let line = choices(&["a", "b"], &[-1.5, -0.5], 1).to_json("t.jsonl", 3);
        let expected = json!({
            "file": "t.jsonl", "line": 3, "log_likelihoods": [-1.5, -0.5], "predicted": 1,
            "predicted_norm": 1, "predicted_bytes": 1, "answer": 1, "right": true,
        });
        assert_eq!(line, expected);
        let line = cloze("a", -0.25, false).to_json("t.jsonl", 1);
        let expected =
            json!({"file": "t.jsonl", "line": 1, "log_likelihood": -0.25, "right": false});
        assert_eq!(line, expected);
    }
}
