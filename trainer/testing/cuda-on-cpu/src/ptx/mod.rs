//! Translates PTX to C: [`parse`] builds a syntax tree, [`translate`] writes a C function for each PTX function.

mod arithmetic;
mod cooperative;
mod instruction;

pub mod lex;
pub mod parse;
pub mod syntax;
pub mod translate;
