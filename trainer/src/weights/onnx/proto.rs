//! The messages of `onnx.proto` (<https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>), as far as a network needs them.

use prost::{Message, Oneof};

/// `TensorProto.DataType.FLOAT`.
pub(super) const FLOAT: i32 = 1;
/// `TensorProto.DataType.INT64`.
pub(super) const INT64: i32 = 7;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Model {
    #[prost(int64, tag = "1")]
    pub(super) ir_version: i64,
    #[prost(string, tag = "2")]
    pub(super) producer_name: String,
    #[prost(string, tag = "3")]
    pub(super) producer_version: String,
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<Graph>,
    #[prost(message, repeated, tag = "8")]
    pub(super) opset_import: Vec<OperatorSet>,
    #[prost(message, repeated, tag = "14")]
    pub(super) metadata_props: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct OperatorSet {
    /// Empty: the operators of ONNX itself.
    #[prost(string, tag = "1")]
    pub(super) domain: String,
    #[prost(int64, tag = "2")]
    pub(super) version: i64,
}

/// `StringStringEntryProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Graph {
    #[prost(message, repeated, tag = "1")]
    pub(super) node: Vec<Node>,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializer: Vec<Tensor>,
    #[prost(message, repeated, tag = "11")]
    pub(super) input: Vec<ValueInfo>,
    #[prost(message, repeated, tag = "12")]
    pub(super) output: Vec<ValueInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(string, repeated, tag = "1")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
    #[prost(string, tag = "4")]
    pub(super) op_type: String,
    #[prost(message, repeated, tag = "5")]
    pub(super) attribute: Vec<Attribute>,
}

/// `AttributeProto`. One of the values is used, as `kind` says.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(float, optional, tag = "2")]
    f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    i: Option<i64>,
    #[prost(int64, repeated, tag = "8")]
    ints: Vec<i64>,
    #[prost(int32, tag = "20")]
    kind: i32,
}

impl Attribute {
    pub(super) fn float(name: &str, value: f32) -> Self {
        Self { name: name.to_owned(), f: Some(value), kind: 1, ..Self::default() }
    }

    pub(super) fn int(name: &str, value: usize) -> Self {
        Self { name: name.to_owned(), i: Some(value as i64), kind: 2, ..Self::default() }
    }

    pub(super) fn ints(name: &str, values: impl IntoIterator<Item = usize>) -> Self {
        let ints = values.into_iter().map(|value| value as i64).collect();
        Self { name: name.to_owned(), ints, kind: 7, ..Self::default() }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int64, repeated, tag = "1")]
    pub(super) dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(super) data_type: i32,
    #[prost(string, tag = "8")]
    pub(super) name: String,
    /// The elements in row-major order, little-endian.
    #[prost(bytes = "vec", tag = "9")]
    pub(super) raw_data: Vec<u8>,
}

impl Tensor {
    pub(super) fn floats(name: &str, shape: &[usize], values: &[f32]) -> Self {
        let dims = shape.iter().map(|&side| side as i64).collect();
        let raw_data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name: name.to_owned(), dims, data_type: FLOAT, raw_data }
    }

    /// A vector.
    pub(super) fn integers(name: &str, values: &[i64]) -> Self {
        let raw_data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { name: name.to_owned(), dims: vec![values.len() as i64], data_type: INT64, raw_data }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueInfo {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    kind: Option<Type>,
    #[prost(string, tag = "3")]
    doc_string: String,
}

#[derive(Clone, PartialEq, Message)]
struct Type {
    #[prost(message, optional, tag = "1")]
    tensor_type: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorType {
    #[prost(int32, tag = "1")]
    elem_type: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(message, repeated, tag = "1")]
    dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
struct Dimension {
    #[prost(oneof = "Length", tags = "1, 2")]
    value: Option<Length>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Length {
    #[prost(int64, tag = "1")]
    Fixed(i64),
    /// A name: any length.
    #[prost(string, tag = "2")]
    Any(String),
}

impl ValueInfo {
    /// Describes floats of the shape `[batch, shape…]`, for any batch.
    pub(super) fn batch(name: &str, shape: &[usize], doc_string: &str) -> Self {
        let fixed = shape.iter().map(|&side| Length::Fixed(side as i64));
        let dims = std::iter::once(Length::Any("batch".to_owned())).chain(fixed);
        let dim = dims.map(|length| Dimension { value: Some(length) }).collect();
        let tensor_type = Some(TensorType { elem_type: FLOAT, shape: Some(Shape { dim }) });
        Self { name: name.to_owned(), kind: Some(Type { tensor_type }), doc_string: doc_string.to_owned() }
    }
}
