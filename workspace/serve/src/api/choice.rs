//! The text of a choice: the decoded tokens of the engine, up to a stop string.

use moh_text::TextStream;

use super::stop::StopStrings;
use super::token_text::Offsets;
use super::{ApiError, Served};
use crate::engine::{ComputedPrompt, Event, Events, FinishReason, GeneratedToken};

/// The events of a choice, in order.
#[derive(Debug)]
pub(super) enum ChoiceEvent {
    /// The prompt is computed.
    Prompt(ComputedPrompt),
    /// A token, the text that it completes, and the number of characters before it.
    Token(GeneratedToken, String, usize),
    /// The rest of the text, and the reason of its end.
    End(String, &'static str),
}

/// Reads a choice from the engine. Dropping the reader cancels the sequence.
#[derive(Debug)]
pub(super) struct ChoiceReader<'a> {
    events: Events,
    text: Option<TextStream<'a>>,
    stops: StopStrings<'a>,
    offsets: Offsets,
}

impl<'a> ChoiceReader<'a> {
    pub fn new(served: &'a Served, prompt: &[u32], stops: &'a [String], events: Events) -> Self {
        let text = Some(served.tokenizer.stream(prompt, true));
        ChoiceReader { events, text, stops: StopStrings::new(stops), offsets: Offsets::default() }
    }

    /// Returns the next piece; `None` after the end.
    pub async fn next(&mut self) -> Option<Result<ChoiceEvent, ApiError>> {
        if self.stops.found {
            // Ends the sequence, because a client that reads on would get tokens after the text.
            self.events.end();
            self.text.take()?;
            return Some(Ok(ChoiceEvent::End(String::new(), FinishReason::Stop.name())));
        }
        self.text.as_ref()?;
        let Some(event) = self.events.next().await else {
            self.text = None;
            let reason = "the engine has ended: ask the server again later";
            let status = axum::http::StatusCode::SERVICE_UNAVAILABLE;
            return Some(Err(ApiError::new(status, reason)));
        };
        Some(self.read(event))
    }

    fn read(&mut self, event: Event) -> Result<ChoiceEvent, ApiError> {
        match event {
            Event::Prompt(prompt) => Ok(ChoiceEvent::Prompt(prompt)),
            Event::Token(token) => {
                let new = match &mut self.text {
                    Some(text) if !token.is_end => text.push(token.id)?,
                    _ => String::new(),
                };
                let before = self.offsets.next(&new);
                let text = self.stops.push(&new);
                Ok(ChoiceEvent::Token(token, text, before))
            }
            Event::Finished(reason) => {
                let rest = self.text.take().map_or(Ok(String::new()), TextStream::finish)?;
                let text = self.stops.push(&rest) + &self.stops.finish();
                let reason = if self.stops.found { FinishReason::Stop } else { reason };
                Ok(ChoiceEvent::End(text, reason.name()))
            }
            Event::Failed(failure) => {
                self.text = None;
                Err(failure.into())
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct WholeChoice {
    pub prompt: ComputedPrompt,
    pub tokens: Vec<GeneratedToken>,
    /// Characters of the text before each token.
    pub offsets: Vec<usize>,
    pub text: String,
    pub reason: &'static str,
}

impl WholeChoice {
    pub async fn read(mut reader: ChoiceReader<'_>) -> Result<Self, ApiError> {
        let mut whole = WholeChoice::default();
        while let Some(piece) = reader.next().await {
            match piece? {
                ChoiceEvent::Prompt(prompt) => whole.prompt = prompt,
                ChoiceEvent::Token(token, text, offset) => {
                    whole.tokens.push(token);
                    whole.offsets.push(offset);
                    whole.text.push_str(&text);
                }
                ChoiceEvent::End(text, reason) => {
                    whole.text.push_str(&text);
                    whole.reason = reason;
                }
            }
        }
        Ok(whole)
    }
}
