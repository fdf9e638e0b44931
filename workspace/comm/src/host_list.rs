//! Slurm's compressed host lists: `gnode[10,20-25]`, `a,b[01-03]-x`.

/// Maximum hosts of a list, more than any cluster has: a range such as `[0-9999999999]` must not
/// exhaust memory.
const MAX_HOSTS: usize = 65_536;

/// Returns the hosts of a compressed list, in order. The error is the reason.
pub(crate) fn expand(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for entry in entries(list)? {
        if entry.is_empty() {
            return Err("a host without a name".into());
        }
        hosts.extend(expand_entry(entry)?);
        if hosts.len() > MAX_HOSTS {
            return Err(too_many());
        }
    }
    Ok(hosts)
}

fn too_many() -> String {
    format!("more than {MAX_HOSTS} hosts")
}

fn entries(list: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (i, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("a bracket within brackets".into()),
            b']' if !inside => return Err("a closing bracket without an opening one".into()),
            b'[' | b']' => inside = !inside,
            b',' if !inside => {
                parts.push(&list[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("an opening bracket without a closing one".into());
    }
    parts.push(&list[start..]);
    Ok(parts)
}

/// Returns the hosts of an entry, such as `rack[1-2]node[01-16]`. The last bracket varies fastest.
fn expand_entry(entry: &str) -> Result<Vec<String>, String> {
    let mut hosts = vec![String::new()];
    let mut rest = entry;
    while let Some((before, after)) = rest.split_once('[') {
        // `entries` has paired the brackets.
        let (numbers, after) = after.split_once(']').ok_or("an unpaired bracket")?;
        let numbers = expand_numbers(numbers)?;
        if hosts.len().saturating_mul(numbers.len()) > MAX_HOSTS {
            return Err(too_many());
        }
        hosts = hosts
            .iter()
            .flat_map(|host| numbers.iter().map(move |number| format!("{host}{before}{number}")))
            .collect();
        rest = after;
    }
    for host in &mut hosts {
        host.push_str(rest);
    }
    Ok(hosts)
}

/// Returns the numbers of a bracket such as `10,20-25`, with their leading zeros.
fn expand_numbers(list: &str) -> Result<Vec<String>, String> {
    let mut numbers = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let value = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let value = text.parse::<u64>().ok().filter(|_| digits);
            value.ok_or_else(|| format!("`{range}` is neither a number nor a range"))
        };
        let (from, to) = (value(first)?, value(last)?);
        if from > to {
            return Err(format!("the range `{range}` runs backwards"));
        }
        if to - from >= MAX_HOSTS as u64 || numbers.len() > MAX_HOSTS {
            return Err(too_many());
        }
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(list: &str) -> Vec<String> {
        expand(list).unwrap()
    }

    #[test]
    fn lists_expand_as_scontrol_expands_them() {
        assert_eq!(hosts("n1"), ["n1"]);
        assert_eq!(hosts("gnode[10,20-22]"), ["gnode10", "gnode20", "gnode21", "gnode22"]);
        assert_eq!(hosts("a,b[01-03]-x"), ["a", "b01-x", "b02-x", "b03-x"]);
        assert_eq!(hosts("r[1-2]n[8-9],z"), ["r1n8", "r1n9", "r2n8", "r2n9", "z"]);
        assert_eq!(hosts("n[008-011]"), ["n008", "n009", "n010", "n011"]);
        assert_eq!(hosts("n[98-101]"), ["n98", "n99", "n100", "n101"]);
    }

    #[test]
    fn a_malformed_list_says_what_is_wrong() {
        for (list, reason) in [
            ("", "a host without a name"),
            ("a,,b", "a host without a name"),
            ("n[1-3", "an opening bracket without a closing one"),
            ("n1-3]", "a closing bracket without an opening one"),
            ("n[1[2]]", "a bracket within brackets"),
            ("n[3-1]", "the range `3-1` runs backwards"),
            ("n[a-b]", "`a-b` is neither a number nor a range"),
            ("n[]", "`` is neither a number nor a range"),
            ("n[+1]", "`+1` is neither a number nor a range"),
            ("n[0-99999999999]", "more than 65536 hosts"),
            ("n[0-999][0-999]", "more than 65536 hosts"),
            ("n[99999999999999999999]", "`99999999999999999999` is neither a number nor a range"),
        ] {
            assert_eq!(expand(list).unwrap_err(), reason, "{list}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(any in "\\PC{0,40}", own in "[\\[\\],0-9a-c-]{0,40}") {
            let _ = (expand(&any), expand(&own));
        }

        #[test]
        fn a_range_expands_to_its_numbers(
            name in "[a-z]{1,4}", first in 0u32..2000, count in 0u32..50, width in 1usize..6,
        ) {
            let list = format!("{name}[{first:0width$}-{:0width$}]", first + count);
            let expected: Vec<String> =
                (first..=first + count).map(|n| format!("{name}{n:0width$}")).collect();
            prop_assert_eq!(expand(&list), Ok(expected));
        }
    }
}
