//! Lists and structures in columns, as the messages of conversations are: as JSON. A field of a structure that is
//! null is left out, because every structure of a column has the same fields, whatever was there when it was written.

use arrow_array::cast::AsArray;
use arrow_array::{Array, FixedSizeListArray, LargeListArray, ListArray};
use arrow_schema::DataType;
use serde_json::{Map, Value as Json};

use super::cells::Cells;
use crate::numbers::MARK;
use crate::prepare::fields::Value;

/// The values of a column of lists or structures.
pub(super) enum Nested<'a> {
    List(&'a ListArray, Box<Cells<'a>>),
    LargeList(&'a LargeListArray, Box<Cells<'a>>),
    FixedSizeList(&'a FixedSizeListArray, Box<Cells<'a>>),
    Struct(Vec<(&'a str, Cells<'a>)>),
}

/// Whether a column of this type has lists.
pub(super) fn is_list(kind: &DataType) -> bool {
    matches!(kind, DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..))
}

impl<'a> Nested<'a> {
    /// `None` for a column of another type.
    pub(super) fn of(column: &'a dyn Array) -> Option<Self> {
        let values = |values: &'a dyn Array| Box::new(Cells::of(values));
        Some(match column.data_type() {
            DataType::List(_) => {
                let list: &ListArray = column.as_list();
                Self::List(list, values(&**list.values()))
            }
            DataType::LargeList(_) => {
                let list: &LargeListArray = column.as_list();
                Self::LargeList(list, values(&**list.values()))
            }
            DataType::FixedSizeList(..) => {
                let list = column.as_fixed_size_list();
                Self::FixedSizeList(list, values(&**list.values()))
            }
            DataType::Struct(fields) => {
                let columns = column.as_struct().columns();
                let fields = fields.iter().zip(columns);
                Self::Struct(
                    fields.map(|(field, column)| (&**field.name(), Cells::of(&**column))).collect(),
                )
            }
            _ => return None,
        })
    }

    /// The rows of the values in a row, and their cells; none of a structure.
    fn items(&self, row: usize) -> Option<(std::ops::Range<usize>, &Cells<'a>)> {
        // Offsets and lengths are not negative: Arrow's arrays are validated when they are made.
        match self {
            Self::List(list, cells) => {
                let offsets = list.value_offsets();
                Some((offsets[row] as usize..offsets[row + 1] as usize, cells))
            }
            Self::LargeList(list, cells) => {
                let offsets = list.value_offsets();
                Some((offsets[row] as usize..offsets[row + 1] as usize, cells))
            }
            Self::FixedSizeList(list, cells) => {
                let length = list.value_length() as usize;
                let first = list.value_offset_at(row);
                Some((first..first + length, cells))
            }
            Self::Struct(_) => None,
        }
    }

    /// Bytes of the values in a row, about.
    pub(super) fn bytes(&self, row: usize) -> usize {
        match (self, self.items(row)) {
            (Self::Struct(fields), _) => {
                fields.iter().map(|(name, cells)| name.len() + cells.bytes(row)).sum()
            }
            (_, Some((rows, cells))) => rows.map(|row| cells.bytes(row)).sum(),
            _ => 0,
        }
    }

    /// The value in a row, which is not null.
    pub(super) fn json(&self, row: usize) -> Json {
        match (self, self.items(row)) {
            (Self::Struct(fields), _) => {
                let present = fields.iter().filter_map(|(name, cells)| {
                    let value = json(cells, row);
                    (!value.is_null()).then(|| ((*name).to_owned(), value))
                });
                Json::Object(present.collect::<Map<_, _>>())
            }
            (_, Some((rows, cells))) => rows.map(|row| json(cells, row)).collect(),
            _ => Json::Null,
        }
    }
}

fn json(cells: &Cells<'_>, row: usize) -> Json {
    if let Some(nested) = cells.nested(row) {
        return nested.json(row);
    }
    match cells.value(row) {
        Value::Text(text) => text.into(),
        Value::NotFinite(name) => format!("{MARK}{name}").into(),
        // As JSON writes it.
        Value::Scalar(text) => serde_json::from_str(&text).unwrap_or(Json::Null),
        _ => Json::Null,
    }
}
