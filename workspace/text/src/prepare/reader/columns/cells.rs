//! The cells of a column: texts, and other values that have a text in a template.

use std::borrow::Cow;
use std::fmt::Display;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, ArrayAccessor, RecordBatch, StructArray, downcast_integer_array};
use arrow_schema::DataType;

use super::nested::Nested;
use crate::prepare::fields::Value;

/// The cells of a column, or of a column in structures.
pub(super) struct Cells<'a> {
    /// The column, and the structures around it. A cell is null where the column or a structure is null.
    columns: Vec<&'a dyn Array>,
    values: Values<'a>,
}

enum Values<'a> {
    Text(ValueOf<'a>),
    Scalar(ValueOf<'a>),
    /// Lists and structures.
    Nested(Nested<'a>),
    /// Values of a type without a text.
    Other,
}

/// The value in a row that is not null.
type ValueOf<'a> = Box<dyn Fn(usize) -> Value<'a> + Send + 'a>;

impl<'a> Cells<'a> {
    /// Returns the cells of the column at the end of these names, or `None` if it is missing.
    pub(super) fn find(batch: &'a RecordBatch, names: &[&str]) -> Option<Self> {
        let (first, rest) = names.split_first()?;
        let mut column: &'a dyn Array = &**batch.column_by_name(first)?;
        let mut columns = vec![column];
        for name in rest {
            let structure: &'a StructArray = column.as_any().downcast_ref()?;
            column = &**structure.column_by_name(name)?;
            columns.push(column);
        }
        Some(Self { columns, ..Self::of(column) })
    }

    pub(super) fn of(column: &'a dyn Array) -> Self {
        let values = downcast_integer_array!(
            column => scalars(column),
            DataType::Null => Values::Text(Box::new(|_| Value::Null)),
            DataType::Utf8 => texts(column.as_string::<i32>()),
            DataType::LargeUtf8 => texts(column.as_string::<i64>()),
            DataType::Utf8View => texts(column.as_string_view()),
            DataType::Binary => bytes(column.as_binary::<i32>()),
            DataType::LargeBinary => bytes(column.as_binary::<i64>()),
            DataType::BinaryView => bytes(column.as_binary_view()),
            DataType::FixedSizeBinary(_) => bytes(column.as_fixed_size_binary()),
            DataType::Dictionary(_, _) => {
                let dictionary = column.as_any_dictionary();
                let values = &**dictionary.values();
                let is_empty = values.is_empty();
                let keys = if is_empty { Vec::new() } else { dictionary.normalized_keys() };
                let values = Self::of(values);
                Values::Text(Box::new(move |row| {
                    keys.get(row).map_or(Value::Null, |&key| values.value(key))
                }))
            }
            DataType::Boolean => scalars(column.as_boolean()),
            DataType::Float32 => floats(column.as_primitive::<Float32Type>()),
            DataType::Float64 => floats(column.as_primitive::<Float64Type>()),
            _ => Nested::of(column).map_or(Values::Other, Values::Nested),
        );
        Self { columns: vec![column], values }
    }

    /// Returns the approximate bytes of the value in a row.
    pub(super) fn bytes(&self, row: usize) -> usize {
        match &self.values {
            Values::Text(_) => match self.value(row) {
                Value::Text(text) => text.len() + size_of::<u64>(),
                _ => size_of::<u64>(),
            },
            Values::Nested(nested) => nested.bytes(row),
            _ => size_of::<u64>(),
        }
    }

    /// Returns the lists and structures of a row that is not null.
    pub(super) fn nested(&self, row: usize) -> Option<&Nested<'a>> {
        match &self.values {
            Values::Nested(nested) if !self.is_null(row) => Some(nested),
            _ => None,
        }
    }

    pub(super) fn kind(&self) -> &DataType {
        self.columns.last().map_or(&DataType::Null, |column| column.data_type())
    }

    fn is_null(&self, row: usize) -> bool {
        self.columns.iter().any(|column| column.is_null(row))
    }

    pub(super) fn value(&self, row: usize) -> Value<'a> {
        if self.is_null(row) {
            return Value::Null;
        }
        match &self.values {
            Values::Text(value) | Values::Scalar(value) => value(row),
            Values::Nested(nested) => Value::Json(Cow::Owned(nested.json("", row).to_string())),
            Values::Other => Value::Other,
        }
    }
}

fn texts<'a>(texts: impl ArrayAccessor<Item = &'a str> + 'a) -> Values<'a> {
    Values::Text(Box::new(move |row| Value::Text(texts.value(row))))
}

/// Returns the bytes that may be a text.
fn bytes<'a>(values: impl ArrayAccessor<Item = &'a [u8]> + 'a) -> Values<'a> {
    Values::Text(Box::new(move |row| {
        str::from_utf8(values.value(row)).map_or(Value::Other, Value::Text)
    }))
}

fn scalars<'a>(values: impl ArrayAccessor<Item: Display> + 'a) -> Values<'a> {
    Values::Scalar(Box::new(move |row| Value::Scalar(Cow::Owned(values.value(row).to_string()))))
}

/// Returns numbers as JSON writes them. JSON has no infinity and no NaN.
fn floats<'a>(values: impl ArrayAccessor<Item: serde::Serialize + Into<f64>> + 'a) -> Values<'a> {
    Values::Scalar(Box::new(move |row| {
        let value = values.value(row);
        match serde_json::to_string(&value) {
            Ok(text) if text != "null" => Value::Scalar(Cow::Owned(text)),
            _ => Value::NotFinite(match value.into() {
                f64::INFINITY => "Infinity",
                f64::NEG_INFINITY => "-Infinity",
                _ => "NaN",
            }),
        }
    }))
}
