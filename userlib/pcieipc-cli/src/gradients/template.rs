// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file name of each rank, from one argument.

use std::{path::PathBuf, str::FromStr};

const MARK: &str = "{rank}";

/// A path with `{rank}` in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(String);

/// The argument names the same file for every rank.
#[derive(Debug, thiserror::Error)]
#[error("no {{rank}} in {0:?}; every rank has its own file: write for example 'grads.{{rank}}.safetensors'")]
pub struct TemplateError(String);

impl FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, TemplateError> {
        if text.contains(MARK) { Ok(Self(text.to_owned())) } else { Err(TemplateError(text.to_owned())) }
    }
}

impl Template {
    /// The file of one rank.
    pub fn path(&self, rank: usize) -> PathBuf {
        self.0.replace(MARK, &rank.to_string()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_becomes_the_rank() {
        let template: Template = "run{rank}/grads.{rank}.safetensors".parse().unwrap();
        assert_eq!(template.path(3), PathBuf::from("run3/grads.3.safetensors"));
    }

    #[test]
    fn a_name_without_a_mark_is_refused_with_an_example() {
        let error = "grads.safetensors".parse::<Template>().unwrap_err().to_string();
        assert!(error.contains("'grads.{rank}.safetensors'"), "{error}");
    }
}
