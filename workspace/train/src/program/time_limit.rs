//! Time limits of a run: `--time-limit`, and the end of a Slurm job.

use std::time::{Duration, Instant, SystemTime};

use moh_train::TimeLimit;

/// The variable in which Slurm gives a job's end, in seconds since 1970. Versions before 23.02 lack it.
const SLURM_END: &str = "SLURM_JOB_END_TIME";
/// Maximum length of a limit, in seconds: a year.
const MAX_SECONDS: u64 = 366 * 24 * 3600;

/// Parses a length of time with units, such as `90m` or `1h30m` (d, h, m, s), or as Slurm writes times:
/// `MINUTES:SECONDS`, `HOURS:MINUTES:SECONDS`, `DAYS-HOURS`, `DAYS-HOURS:MINUTES` and `DAYS-HOURS:MINUTES:SECONDS`.
/// Fails if the text has another form, with the expected forms, or if the time is zero or longer than a year.
pub(crate) fn parse_time_limit(text: &str) -> Result<Duration, String> {
    let seconds = if text.contains([':', '-']) { slurm(text) } else { with_units(text) };
    match seconds {
        Some(seconds @ 1..=MAX_SECONDS) => Ok(Duration::from_secs(seconds)),
        Some(0) => Err("must be above 0".to_owned()),
        Some(_) => Err("must be at most a year".to_owned()),
        None => Err("expected a time such as 90m, 1h30m, 12:00:00 or 2-12:00:00".to_owned()),
    }
}

/// Returns the seconds of a time with units. Each unit occurs at most once, the largest first.
fn with_units(text: &str) -> Option<u64> {
    let mut units = [('d', 24 * 3600), ('h', 3600), ('m', 60), ('s', 1)].into_iter();
    let (mut rest, mut total) = (text, None);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let (digits, more) = rest.split_at(end);
        let unit = more.chars().next()?;
        let (_, seconds) = units.find(|&(name, _)| name == unit)?;
        let part = digits.parse::<u64>().ok()?.checked_mul(seconds)?;
        total = Some(part.checked_add(total.unwrap_or(0))?);
        rest = &more[unit.len_utf8()..];
    }
    total
}

fn slurm(text: &str) -> Option<u64> {
    let (days, time) = match text.split_once('-') {
        Some((days, time)) => (Some(days), time),
        None => (None, text),
    };
    let parts: Vec<&str> = time.split(':').collect();
    let (hours, minutes, seconds) = match (days, &parts[..]) {
        (None, [minutes, seconds]) => ("0", *minutes, *seconds),
        (_, [hours, minutes, seconds]) => (*hours, *minutes, *seconds),
        (Some(_), [hours]) => (*hours, "0", "0"),
        (Some(_), [hours, minutes]) => (*hours, *minutes, "0"),
        _ => return None,
    };
    let parts = [(days.unwrap_or("0"), 24 * 3600), (hours, 3600), (minutes, 60), (seconds, 1)];
    parts.into_iter().try_fold(0u64, |total, (digits, unit)| {
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let part = digits.parse::<u64>().ok().filter(|_| is_number)?.checked_mul(unit)?;
        total.checked_add(part)
    })
}

/// Returns the limit of a run: the earlier of `asked`, which counts from `start`, and the end of a Slurm job.
pub(crate) fn time_limit(start: Instant, asked: Option<Duration>) -> Option<TimeLimit> {
    let asked = asked.map(|length| TimeLimit::new(start, length));
    let job = std::env::var(SLURM_END).ok().and_then(|end| job_left(&end, SystemTime::now()));
    let job = job.map(|left| TimeLimit::new(Instant::now(), left));
    match (asked, job) {
        (Some(asked), Some(job)) => Some(asked.earlier(job)),
        (asked, job) => asked.or(job),
    }
}

/// Returns the time that a job with this end has left. Returns `None` if the end is not a time or is past: then it
/// belongs to another job, and the environment was kept.
fn job_left(end: &str, now: SystemTime) -> Option<Duration> {
    let end = Duration::from_secs(end.trim().parse().ok()?);
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    end.checked_sub(since_epoch).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;

    #[test]
    fn times_with_units_and_those_of_slurm_are_read() {
        for (text, seconds) in [
            ("90m", 90 * MINUTE),
            ("4h", 4 * HOUR),
            ("1h30m", 90 * MINUTE),
            ("2d12h", 60 * HOUR),
            ("1h5s", HOUR + 5),
            ("90s", 90),
            ("30:00", 30 * MINUTE),
            ("12:30:05", 12 * HOUR + 30 * MINUTE + 5),
            ("2-12:00:00", 60 * HOUR),
            ("1-0", 24 * HOUR),
            ("1-06:30", 30 * HOUR + 30 * MINUTE),
            ("100:00:00", 100 * HOUR),
        ] {
            assert_eq!(parse_time_limit(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        let nonsense = "expected a time such as 90m, 1h30m, 12:00:00 or 2-12:00:00";
        for (text, reason) in [
            ("", nonsense),
            // Minutes for Slurm, seconds for others.
            ("90", nonsense),
            ("h", nonsense),
            ("1h30", nonsense),
            ("30m1h", nonsense),
            ("1h1h", nonsense),
            ("1.5h", nonsense),
            ("-1h", nonsense),
            ("+1:00:00", nonsense),
            ("1:2:3:4", nonsense),
            ("1-2-3", nonsense),
            ("1-", nonsense),
            (":30", nonsense),
            ("4 h", nonsense),
            ("99999999999999999999h", nonsense),
            ("9999999999999999h", nonsense),
            ("0m", "must be above 0"),
            ("0:00:00", "must be above 0"),
            ("400d", "must be at most a year"),
        ] {
            assert_eq!(parse_time_limit(text), Err(reason.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_job_has_the_time_until_its_end() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        assert_eq!(job_left("1600", now), Some(Duration::from_secs(600)));
        for end in ["1000", "999", "", "soon", "-5", "1e9"] {
            assert_eq!(job_left(end, now), None, "{end}");
        }
    }
}
