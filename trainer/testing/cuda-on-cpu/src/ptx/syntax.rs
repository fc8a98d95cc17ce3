//! Syntax tree of PTX.

/// A module: variables outside functions, and functions.
#[derive(Debug, Default)]
pub struct Unit {
    /// `.global`, `.const` and `.shared` variables.
    pub variables: Vec<Variable>,
    /// Kernels and device functions with a body.
    pub functions: Vec<Function>,
}

/// A variable of memory.
#[derive(Debug, Clone)]
pub struct Variable {
    /// `shared`, `global`, `const`, `local` or `param`.
    pub space: String,
    /// Name in PTX.
    pub name: String,
    /// Alignment in bytes.
    pub align: usize,
    /// Size in bytes; 0 for dynamic shared memory.
    pub bytes: usize,
    /// Initial bytes, if any were given.
    pub value: Vec<u8>,
    /// Whether the variable is declared `.extern`: for shared memory, the dynamic part.
    pub external: bool,
}

/// A function with its body.
#[derive(Debug)]
pub struct Function {
    /// Whether it is a kernel, not a device function.
    pub entry: bool,
    /// Name in PTX.
    pub name: String,
    /// Parameters in order.
    pub parameters: Vec<Variable>,
    /// Return values.
    pub results: Vec<Variable>,
    /// Statements of the body.
    pub body: Vec<Statement>,
}

/// One statement of a body.
#[derive(Debug, Clone)]
pub enum Statement {
    /// `{`
    Open,
    /// `}`
    Close,
    /// A label.
    Label(String),
    /// Registers of a type: names, each with the number of them if it is a family (`%r<5>`).
    Registers(String, Vec<(String, Option<usize>)>),
    /// A variable in memory.
    Variable(Variable),
    /// A table of labels for `brx.idx`.
    Targets(String, Vec<String>),
    /// An instruction.
    Instruction(Instruction),
}

/// An instruction.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// The guard predicate, and whether the predicate is negated.
    pub guard: Option<(String, bool)>,
    /// The opcode, split at its dots.
    pub op: Vec<String>,
    /// Operands.
    pub operands: Vec<Operand>,
}

/// An operand of an instruction.
#[derive(Debug, Clone)]
pub enum Operand {
    /// A register, a variable, a label or a special register. `_` is the sink.
    Name(String),
    /// `!p`
    Not(String),
    /// An integer.
    Integer(i128),
    /// Bits of an f32.
    F32(u32),
    /// Bits of an f64.
    F64(u64),
    /// `[base+offset]`; the base is empty for an absolute address.
    Address(String, i64),
    /// `{a, b}`, or the list in a call's brackets.
    Vector(Vec<Operand>),
    /// `p|q`
    Pair(String, String),
}

/// Returns the bytes of a fundamental type; `None` for other names.
pub fn bytes_of(kind: &str) -> Option<usize> {
    Some(match kind {
        "pred" | "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        "b128" => 16,
        _ => return None,
    })
}
