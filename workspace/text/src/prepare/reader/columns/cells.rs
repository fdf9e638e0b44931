//! The cells of a column: texts, and what else has a text in a template.

use std::borrow::Cow;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{
    Array, BooleanArray, LargeStringArray, PrimitiveArray, RecordBatch, StringArray,
    StringViewArray, StructArray,
};
use arrow_schema::DataType;

use super::nested::Nested;
use crate::prepare::fields::Value;

/// The cells of a column, or of one in columns of structures.
pub(super) struct Cells<'a> {
    /// The column, and the structures around it: a cell is null where one of them is.
    columns: Vec<&'a dyn Array>,
    values: Values<'a>,
}

enum Values<'a> {
    Text(&'a StringArray),
    LargeText(&'a LargeStringArray),
    TextView(&'a StringViewArray),
    /// For each cell an index of the values.
    Dictionary(Vec<usize>, Box<Cells<'a>>),
    Boolean(&'a BooleanArray),
    Float32(&'a PrimitiveArray<Float32Type>),
    Float64(&'a PrimitiveArray<Float64Type>),
    Int8(&'a PrimitiveArray<Int8Type>),
    Int16(&'a PrimitiveArray<Int16Type>),
    Int32(&'a PrimitiveArray<Int32Type>),
    Int64(&'a PrimitiveArray<Int64Type>),
    UInt8(&'a PrimitiveArray<UInt8Type>),
    UInt16(&'a PrimitiveArray<UInt16Type>),
    UInt32(&'a PrimitiveArray<UInt32Type>),
    UInt64(&'a PrimitiveArray<UInt64Type>),
    /// Lists and structures.
    Nested(Nested<'a>),
    /// Of a type without a text.
    Other,
}

impl<'a> Cells<'a> {
    /// The cells of the column at the end of these names; `None` if it is missing.
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
        let values = match column.data_type() {
            DataType::Utf8 => Values::Text(column.as_string()),
            DataType::LargeUtf8 => Values::LargeText(column.as_string()),
            DataType::Utf8View => Values::TextView(column.as_string_view()),
            DataType::Dictionary(_, _) => {
                let dictionary = column.as_any_dictionary();
                let values = &**dictionary.values();
                let is_empty = values.is_empty();
                let keys = if is_empty { Vec::new() } else { dictionary.normalized_keys() };
                Values::Dictionary(keys, Box::new(Self::of(values)))
            }
            DataType::Boolean => Values::Boolean(column.as_boolean()),
            DataType::Float32 => Values::Float32(column.as_primitive()),
            DataType::Float64 => Values::Float64(column.as_primitive()),
            DataType::Int8 => Values::Int8(column.as_primitive()),
            DataType::Int16 => Values::Int16(column.as_primitive()),
            DataType::Int32 => Values::Int32(column.as_primitive()),
            DataType::Int64 => Values::Int64(column.as_primitive()),
            DataType::UInt8 => Values::UInt8(column.as_primitive()),
            DataType::UInt16 => Values::UInt16(column.as_primitive()),
            DataType::UInt32 => Values::UInt32(column.as_primitive()),
            DataType::UInt64 => Values::UInt64(column.as_primitive()),
            _ => Nested::of(column).map_or(Values::Other, Values::Nested),
        };
        Self { columns: vec![column], values }
    }

    /// Bytes of the value in a row, about.
    pub(super) fn bytes(&self, row: usize) -> usize {
        match &self.values {
            Values::Text(_)
            | Values::LargeText(_)
            | Values::TextView(_)
            | Values::Dictionary(..) => match self.value(row) {
                Value::Text(text) => text.len() + size_of::<u64>(),
                _ => size_of::<u64>(),
            },
            Values::Nested(nested) => nested.bytes(row),
            _ => size_of::<u64>(),
        }
    }

    /// The lists and structures of a row that is not null.
    pub(super) fn nested(&self, row: usize) -> Option<&Nested<'a>> {
        match &self.values {
            Values::Nested(nested) if !self.is_null(row) => Some(nested),
            _ => None,
        }
    }

    fn is_null(&self, row: usize) -> bool {
        self.columns.iter().any(|column| column.is_null(row))
    }

    pub(super) fn value(&self, row: usize) -> Value<'a> {
        if self.is_null(row) {
            return Value::Null;
        }
        let scalar = |text: String| Value::Scalar(Cow::Owned(text));
        match &self.values {
            Values::Text(texts) => Value::Text(texts.value(row)),
            Values::LargeText(texts) => Value::Text(texts.value(row)),
            Values::TextView(texts) => Value::Text(texts.value(row)),
            Values::Dictionary(keys, values) => {
                keys.get(row).map_or(Value::Null, |&key| values.value(key))
            }
            Values::Boolean(values) => scalar(values.value(row).to_string()),
            Values::Float32(values) => finite(values.value(row)),
            Values::Float64(values) => finite(values.value(row)),
            Values::Int8(values) => scalar(values.value(row).to_string()),
            Values::Int16(values) => scalar(values.value(row).to_string()),
            Values::Int32(values) => scalar(values.value(row).to_string()),
            Values::Int64(values) => scalar(values.value(row).to_string()),
            Values::UInt8(values) => scalar(values.value(row).to_string()),
            Values::UInt16(values) => scalar(values.value(row).to_string()),
            Values::UInt32(values) => scalar(values.value(row).to_string()),
            Values::UInt64(values) => scalar(values.value(row).to_string()),
            Values::Nested(nested) => Value::Json(Cow::Owned(nested.json(row).to_string())),
            Values::Other => Value::Other,
        }
    }
}

/// A number as JSON writes it, which has none for infinity.
fn finite<'a>(value: impl serde::Serialize + Into<f64>) -> Value<'a> {
    match serde_json::to_string(&value) {
        Ok(text) if text != "null" => Value::Scalar(Cow::Owned(text)),
        _ => Value::NotFinite(match value.into() {
            f64::INFINITY => "Infinity",
            f64::NEG_INFINITY => "-Infinity",
            _ => "NaN",
        }),
    }
}
