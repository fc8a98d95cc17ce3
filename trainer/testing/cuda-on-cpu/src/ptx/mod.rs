//! Translates PTX to C: [`parse`] builds a syntax tree, [`translate`] writes a C function for each PTX function.

mod arithmetic;
mod instruction;
mod together;

pub mod lex;
pub mod parse;
pub mod syntax;
pub mod translate;
