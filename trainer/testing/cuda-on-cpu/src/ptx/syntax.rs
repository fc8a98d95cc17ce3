//! What PTX is made of.

/// A module: variables outside of functions, and functions.
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
    /// Its name in PTX.
    pub name: String,
    /// Alignment in bytes.
    pub align: usize,
    /// Size in bytes; 0 for dynamic shared memory.
    pub bytes: usize,
    /// Initial bytes, if any were given.
    pub value: Vec<u8>,
    /// Declared elsewhere: for shared memory, the dynamic part.
    pub external: bool,
}

/// A function with its body.
#[derive(Debug)]
pub struct Function {
    /// A kernel, not a function of the device's.
    pub entry: bool,
    /// Its name.
    pub name: String,
    /// Parameters in order.
    pub parameters: Vec<Variable>,
    /// What it returns.
    pub results: Vec<Variable>,
    /// Its statements.
    pub body: Vec<Statement>,
}

/// One statement of a body.
#[derive(Debug, Clone)]
pub enum Statement {
    /// `{`
    Open,
    /// `}`
    Close,
    /// A place to jump to.
    Label(String),
    /// Registers of a type: names, each with the number of them if it is a family (`%r<5>`).
    Registers(String, Vec<(String, Option<usize>)>),
    /// A variable of memory.
    Variable(Variable),
    /// A table of labels for `brx.idx`.
    Targets(String, Vec<String>),
    /// An instruction.
    Instruction(Instruction),
}

/// An instruction.
#[derive(Debug, Clone)]
pub struct Instruction {
    /// The predicate that it depends on, and whether that is negated.
    pub guard: Option<(String, bool)>,
    /// The opcode, split at its dots.
    pub op: Vec<String>,
    /// What it works on.
    pub operands: Vec<Operand>,
}

/// What an instruction works on.
#[derive(Debug, Clone)]
pub enum Operand {
    /// A register, a variable, a label, a special register; `_` is nothing.
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

/// Bytes of a fundamental type; `None` if it is none.
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
