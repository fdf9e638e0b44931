//! Lists and structures in columns, such as the messages of conversations, as JSON. Null fields of a structure are
//! skipped, because all structures of a column have the same fields, even if they were written without some of them.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ListLikeArray};
use arrow_schema::DataType;
use serde_json::{Map, Value as Json};

use super::cells::Cells;
use crate::numbers::{MARK, NO_JSON};
use crate::prepare::fields::Value;

/// The values of a column of lists or structures.
pub(super) enum Nested<'a> {
    List(&'a dyn ListLikeArray, Box<Cells<'a>>),
    Struct(Vec<(&'a str, Cells<'a>)>),
}

/// Returns whether a column of this type has lists.
pub(super) fn is_list(kind: &DataType) -> bool {
    matches!(kind, DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..))
}

impl<'a> Nested<'a> {
    /// Returns the values of a column, or `None` for a column of another type.
    pub(super) fn of(column: &'a dyn Array) -> Option<Self> {
        let list: &dyn ListLikeArray = match column.data_type() {
            DataType::List(_) => column.as_list::<i32>(),
            DataType::LargeList(_) => column.as_list::<i64>(),
            DataType::FixedSizeList(..) => column.as_fixed_size_list(),
            DataType::Struct(fields) => {
                let fields = fields.iter().zip(column.as_struct().columns());
                let cells = fields.map(|(field, column)| (&**field.name(), Cells::of(&**column)));
                return Some(Self::Struct(cells.collect()));
            }
            _ => return None,
        };
        Some(Self::List(list, Box::new(Cells::of(&**list.values()))))
    }

    /// Returns the approximate bytes of the values in a row.
    pub(super) fn bytes(&self, row: usize) -> usize {
        match self {
            Self::Struct(fields) => {
                fields.iter().map(|(name, cells)| name.len() + cells.bytes(row)).sum()
            }
            Self::List(list, cells) => list.element_range(row).map(|row| cells.bytes(row)).sum(),
        }
    }

    /// Returns the value in a row, which is not null, of the field with this name.
    pub(super) fn json(&self, name: &str, row: usize) -> Json {
        match self {
            Self::Struct(fields) => {
                let present = fields.iter().filter_map(|(name, cells)| {
                    let value = json(name, cells, row);
                    (!value.is_null()).then(|| ((*name).to_owned(), value))
                });
                Json::Object(present.collect::<Map<_, _>>())
            }
            Self::List(list, cells) => {
                list.element_range(row).map(|row| json(name, cells, row)).collect()
            }
        }
    }
}

fn json(name: &str, cells: &Cells<'_>, row: usize) -> Json {
    if let Some(nested) = cells.nested(row) {
        return nested.json(name, row);
    }
    match cells.value(row) {
        Value::Text(text) => text.into(),
        Value::NotFinite(name) => format!("{MARK}{name}").into(),
        // The text is JSON.
        Value::Scalar(text) | Value::Json(text) => {
            serde_json::from_str(&text).unwrap_or(Json::Null)
        }
        Value::Null => Json::Null,
        _ => format!("{MARK}{NO_JSON}the field {name:?} is {}, no text", cells.kind()).into(),
    }
}
