//! PTX into C: [`parse`] reads it, [`translate`] writes a C function for each of its functions.

mod arithmetic;
mod instruction;
mod together;

pub mod lex;
pub mod parse;
pub mod syntax;
pub mod translate;
