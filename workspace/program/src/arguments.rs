//! Parses the arguments of a program. A negative number is the value of the option before it, and the option's own
//! check reports the values that it expects.

use std::fmt::Display;
use std::str::FromStr;

use clap::{Command, Parser};

/// Returns the program's arguments. Errors end the program, as [`Parser::parse`] does.
pub fn parse<P: Parser>() -> P {
    let mut command = take_negative_numbers(P::command());
    let mut matches = command.clone().get_matches();
    P::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.format(&mut command).exit())
}

/// Makes every option of a command and its subcommands accept a negative number as its value, not as the name of an
/// option.
fn take_negative_numbers(command: Command) -> Command {
    let command = command.mut_args(|argument| match argument.get_action().takes_values() {
        true => argument.allow_negative_numbers(true),
        false => argument,
    });
    command.mut_subcommands(take_negative_numbers)
}

/// Parses a finite number that is not negative.
pub fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected a number of at least 0".to_owned())
}

/// Returns a parser of values that are `accepted`. Its errors say `expected`.
pub fn only<T: FromStr + Clone + Send + Sync + 'static>(
    accepted: fn(&T) -> bool,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| text.parse().ok().filter(accepted).ok_or_else(|| expected.to_owned())
}

/// Returns a parser of whole numbers of at least `min`. Its errors name `min`.
pub fn at_least<T>(min: T) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number: &T| *number >= min);
        number.ok_or_else(|| format!("expected a whole number of at least {min}"))
    }
}

/// Returns a parser of whole numbers from `min` to `max`.
pub fn between<T>(
    min: T,
    max: T,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number: &T| (&min..=&max).contains(&number));
        number.ok_or_else(|| format!("expected a whole number from {min} to {max}"))
    }
}
