//! Bounds the time and the memory of a template. The engine has fuel. An instruction costs one unit, each 64 bytes of a
//! string that it creates cost one, and each two items that a filter visits cost one. The engine charges nothing for
//! joining lists, comparing values, nesting lists, and Python's methods. Functions of this module replace these
//! operations, and charge before they work. [`Charge`] charges for values that are written.

use std::cmp::Ordering;

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, tests};
use minijinja_contrib::pycompat;

use crate::{python, strings};

/// Maximum depth of nested lists: walking a value needs stack for each level.
const MAX_DEPTH: usize = 200;
/// Maximum digits of a width in a format.
const MAX_WIDTH_DIGITS: usize = 4;
/// Maximum bytes of an escaped letter.
const ESCAPED_BYTES: usize = 5;
/// Parts of a unit of fuel. A value is charged [`NODE`] parts, and one part for four bytes.
const PARTS: u64 = 16;
const NODE: u64 = 8;

type Operator = fn(&State, &Value, &Value) -> Result<Value, Error>;

/// The functions that replace instructions of two operands. Templates cannot use their names.
const OPERATORS: [(&str, Operator); 9] = [
    ("+", add),
    ("~", joined),
    ("==", |state, a, b| compared(state, a, b).map(|()| Value::from(a == b))),
    ("!=", |state, a, b| compared(state, a, b).map(|()| Value::from(a != b))),
    ("<", |state, a, b| ordered(state, a, b, Ordering::is_lt)),
    ("<=", |state, a, b| ordered(state, a, b, Ordering::is_le)),
    (">", |state, a, b| ordered(state, a, b, Ordering::is_gt)),
    (">=", |state, a, b| ordered(state, a, b, Ordering::is_ge)),
    ("in", is_in),
];

/// Adds the functions and methods of templates that are charged here.
pub(crate) fn install(environment: &mut Environment<'_>) {
    for (name, operator) in OPERATORS {
        environment
            .add_function(name, move |state: &State, a: Value, b: Value| operator(state, &a, &b));
    }
    environment.add_function("[]", |state: &State, values: Rest<Value>| {
        nested(state, &values).map(|()| Value::from(values.to_vec()))
    });
    environment.add_function("()", |state: &State, values: Rest<Value>| {
        nested(state, &values).map(|()| Value::from(Tuple::from(&values[..])))
    });
    environment.add_function("{}", |state: &State, values: Rest<Value>| {
        let pairs = values.as_chunks().0.iter().map(|[key, value]| (key.clone(), value.clone()));
        nested(state, &values).map(|()| Value::from_pairs(pairs))
    });
    environment.add_test("iterable", |value: &Value| !value.is_none() && tests::is_iterable(value));
    environment.add_test("sequence", |value: &Value| {
        let is_kind = matches!(value.kind(), ValueKind::String | ValueKind::Map);
        is_kind || tests::is_sequence(value)
    });
    // Undefined values are callable in Jinja. So are the methods of maps and texts, which are undefined here.
    environment.add_test("callable", |value: &Value| {
        value.is_undefined() || value.as_object().is_some() && value.kind() == ValueKind::Plain
    });
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_filter("int", strings::int);
    environment.add_filter("trim", strings::trim);
    environment.add_filter("string", |state: &State, value: Value| python::text(state, &value));
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        charge_method(state, value, method, arguments)?;
        if let Some(text) = value.as_str()
            && let Some(found) = strings::method(text, method, arguments)
        {
            return found;
        }
        pycompat::unknown_method_callback(state, value, method, arguments)
    });
}

/// Replaces the instructions that the engine does not charge. Fails for a block `autoescape`, unless it is off.
pub(crate) fn replace(instructions: &mut Instructions<'_>) -> Result<(), Error> {
    for index in 0_u32.. {
        let before = index.checked_sub(1).and_then(|before| instructions.get(before));
        let is_off = matches!(before, Some(Instruction::LoadConst(value)) if !value.is_true());
        let Some(instruction) = instructions.get_mut(index) else { break };
        let (name, count) = match instruction {
            Instruction::PushAutoEscape if !is_off => {
                let reason = "a block autoescape writes what is printed as HTML: take it out";
                return Err(fault(reason.to_owned()));
            }
            Instruction::Add => ("+", 2),
            Instruction::StringConcat => ("~", 2),
            Instruction::Eq => ("==", 2),
            Instruction::Ne => ("!=", 2),
            Instruction::Lt => ("<", 2),
            Instruction::Lte => ("<=", 2),
            Instruction::Gt => (">", 2),
            Instruction::Gte => (">=", 2),
            Instruction::In => ("in", 2),
            Instruction::BuildList(Some(count)) => ("[]", *count),
            Instruction::BuildTuple(Some(count)) => ("()", *count),
            Instruction::BuildMap(count) => ("{}", 2 * *count),
            _ => continue,
        };
        // A longer list or map is written out in the template, and costs its length.
        if let Ok(count) = u16::try_from(count) {
            *instruction = Instruction::CallFunction(name, Some(count));
        }
    }
    Ok(())
}

/// Charges fuel for values, in parts of a unit.
pub(crate) struct Charge<'s, 't, 'e> {
    state: &'s State<'t, 'e>,
    parts: u64,
}

impl<'s, 't, 'e> Charge<'s, 't, 'e> {
    pub(crate) fn new(state: &'s State<'t, 'e>) -> Self {
        Self { state, parts: 0 }
    }

    fn take(&mut self, parts: u64) -> Result<(), Error> {
        self.parts += parts;
        match self.parts / PARTS {
            0 => Ok(()),
            fuel => {
                self.parts %= PARTS;
                self.state.consume_fuel(fuel)
            }
        }
    }

    /// Charges a value without its inner values. `depth` is the number of lists around it.
    pub(crate) fn node(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(fault(format!("a value within more than {MAX_DEPTH} others")));
        }
        self.take(NODE + value.as_str().map_or(0, |text| text.len() as u64 / 4))
    }

    /// Charges a value and all values in it.
    fn walk(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.node(value, depth)?;
        let kind = value.kind();
        if !matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        let Ok(items) = value.try_iter() else { return Ok(()) };
        for item in items.checked() {
            let item = item?;
            self.walk(&item, depth + 1)?;
            if kind == ValueKind::Map {
                self.walk(&value.get_item(&item)?, depth + 1)?;
            }
        }
        Ok(())
    }
}

pub(crate) fn fault(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Fails if creating so many bytes would use up the fuel.
fn has_fuel(state: &State, bytes: usize) -> Result<(), Error> {
    match state.fuel_levels() {
        Some((_, left)) if bytes as u64 / 64 >= left => Err(ErrorKind::OutOfFuel.into()),
        _ => Ok(()),
    }
}

fn joined(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => concat(state, a, b).map(Value::from),
        _ => Ok(Value::from(python::text(state, a)? + &python::text(state, b)?)),
    }
}

fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    match (a.as_str(), b.as_str()) {
        (Some(_), Some(_)) if a.is_safe() != b.is_safe() => {
            return add(state, &escape(state, a)?, &escape(state, b)?);
        }
        (Some(text), Some(other)) => {
            let text = concat(state, text, other)?;
            return Ok(if a.is_safe() { Value::from_safe_string(text) } else { text.into() });
        }
        _ => {}
    }
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(a) && is_list(b) && a.is_tuple() == b.is_tuple() {
        let (mut items, mut charge) = (Vec::new(), Charge::new(state));
        for item in a.try_iter()?.checked().chain(b.try_iter()?.checked()) {
            charge.take(NODE)?;
            items.push(item?);
        }
        return Ok(if a.is_tuple() { Tuple::from(items).into() } else { items.into() });
    }
    if !is_number(a.kind()) || !is_number(b.kind()) {
        return Err(fault(format!("cannot add {} and {}", a.kind(), b.kind())));
    }
    let none: [(&str, Value); 0] = [];
    filters::sum(state, vec![b.clone()].into(), None, Some(a.clone()), none.into_iter().collect())
}

fn is_number(kind: ValueKind) -> bool {
    matches!(kind, ValueKind::Number | ValueKind::Bool)
}

fn concat(state: &State, a: &str, b: &str) -> Result<String, Error> {
    has_fuel(state, a.len() + b.len())?;
    Ok([a, b].concat())
}

/// Applies the filter `escape` as Jinja does. A text that this filter or `safe` has marked as safe stays unchanged.
fn escape(state: &State, value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = python::text(state, value)?;
    has_fuel(state, text.len().saturating_mul(ESCAPED_BYTES))?;
    let codes = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ("\"", "&#34;")];
    let text = codes.iter().fold(text, |text, (letter, code)| text.replace(letter, code));
    Ok(Value::from_safe_string(text))
}

/// Returns whether `is` is true of the order of two values. It is never true of NaN. Fails for values that Python does
/// not compare.
fn ordered(state: &State, a: &Value, b: &Value, is: fn(Ordering) -> bool) -> Result<Value, Error> {
    compared(state, a, b)?;
    let is_ordered = match (a.kind(), b.kind()) {
        (one, other) if is_number(one) && is_number(other) => true,
        (one, other) => one == other && matches!(one, ValueKind::String | ValueKind::Seq),
    };
    if !is_ordered {
        return Err(fault(format!("cannot compare {} and {}", a.kind(), b.kind())));
    }
    let is_nan = |value: &Value| f64::try_from(value.clone()).is_ok_and(f64::is_nan);
    Ok(Value::from(!is_nan(a) && !is_nan(b) && is(a.cmp(b))))
}

fn compared(state: &State, a: &Value, b: &Value) -> Result<(), Error> {
    let mut charge = Charge::new(state);
    match (a.as_object(), b.as_object()) {
        (Some(_), Some(_)) => charge.walk(a, 0).and_then(|()| charge.walk(b, 0)),
        _ => charge.node(a, 0),
    }
}

fn is_in(state: &State, value: &Value, container: &Value) -> Result<Value, Error> {
    let kind = container.kind();
    if matches!(kind, ValueKind::None | ValueKind::Bool | ValueKind::Number) {
        return Err(fault(format!("cannot look for a value in {kind}")));
    }
    if value.as_object().is_some() {
        compared(state, value, container)?;
    }
    tests::is_in(state, value, container).map(Value::from)
}

/// Charges the lists and maps in a new list or map. Writing or comparing it walks them, however often they occur.
fn nested(state: &State, values: &[Value]) -> Result<(), Error> {
    let mut charge = Charge::new(state);
    let mut inner = values.iter().filter(|value| value.as_object().is_some());
    inner.try_for_each(|value| charge.walk(value, 1))
}

/// Charges for the values that a method of Python's reads. Fails if its result would use up the fuel.
fn charge_method(
    state: &State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<(), Error> {
    let mut charge = Charge::new(state);
    let Some(text) = value.as_str() else {
        return if method == "count" { charge.walk(value, 0) } else { Ok(()) };
    };
    charge.node(value, 0)?;
    let argument = |index: usize| arguments.get(index).and_then(Value::as_str).unwrap_or_default();
    let count = |part: &str| if part.is_empty() { text.len() } else { text.matches(part).count() };
    let made = match (method, arguments.first()) {
        ("replace", _) => count(argument(0)).saturating_mul(argument(1).len()),
        ("split" | "rsplit" | "splitlines", _) => {
            size_of::<Value>().saturating_mul(match argument(0) {
                "" => text.len(),
                separator => count(separator),
            })
        }
        ("join", Some(list)) => {
            charge.walk(list, 0)?;
            list.len().unwrap_or(0).saturating_mul(text.len())
        }
        ("format", _) => {
            let mut runs = text.split(|digit: char| !digit.is_ascii_digit());
            match runs.find(|run| run.len() > MAX_WIDTH_DIGITS) {
                Some(width) => {
                    return Err(fault(format!("format: the width {width} is too large")));
                }
                None => 10usize.pow(MAX_WIDTH_DIGITS as u32) * text.matches('{').count(),
            }
        }
        _ => 0,
    };
    has_fuel(state, made)
}
