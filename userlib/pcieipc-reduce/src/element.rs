// SPDX-License-Identifier: MIT OR Apache-2.0
//! Element types and operations.

use half::{bf16, f16};

use crate::Form;

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Kind {
    F64 = 0,
    F32 = 1,
    F16 = 2,
    BF16 = 3,
    I8 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    U8 = 8,
    U16 = 9,
    U32 = 10,
    U64 = 11,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
    ];

    /// Bytes of one element.
    ///
    /// ```
    /// assert_eq!(pcieipc_reduce::Kind::BF16.size(), 2);
    /// ```
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }

    /// Bytes of one element as it lies in a record or in scratch memory.
    ///
    /// ```
    /// use pcieipc_reduce::{Form, Kind};
    /// assert_eq!((Kind::BF16.size_as(Form::Element), Kind::BF16.size_as(Form::Partial)), (2, 4));
    /// ```
    #[inline]
    pub fn size_as(self, form: Form) -> usize {
        match (form, self) {
            (Form::Partial, Self::F16 | Self::BF16) => 4,
            _ => self.size(),
        }
    }

    /// Whether the order in which elements are added changes the sum.
    ///
    /// ```
    /// use pcieipc_reduce::Kind;
    /// assert!(Kind::F16.is_float() && !Kind::U8.is_float());
    /// ```
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The kind with that number, as it travels between ranks.
    ///
    /// ```
    /// use pcieipc_reduce::Kind;
    /// assert_eq!((Kind::from_code(Kind::I64 as u8), Kind::from_code(99)), (Some(Kind::I64), None));
    /// ```
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|k| *k as u8 == code)
    }

    /// The name that users read and write.
    ///
    /// ```
    /// use pcieipc_reduce::Kind;
    /// assert_eq!(Kind::BF16.name().parse(), Ok(Kind::BF16));
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|k| k.name().eq_ignore_ascii_case(s)).ok_or_else(|| format!("no element type is called {s}"))
    }
}

/// How elements are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Their sum; integers wrap.
    Sum = 0,
    /// Their product; integers wrap.
    Prod = 1,
    /// The least; NaN if any is NaN.
    Min = 2,
    /// The greatest; NaN if any is NaN.
    Max = 3,
    /// The sum divided by the number of ranks; of integers, the wrapped sum divided towards zero.
    Average = 4,
}

impl Op {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Average];

    /// The operation with that number, as it travels between ranks.
    ///
    /// ```
    /// use pcieipc_reduce::Op;
    /// assert_eq!((Op::from_code(Op::Max as u8), Op::from_code(99)), (Some(Op::Max), None));
    /// ```
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|o| *o as u8 == code)
    }

    /// The name that users read and write.
    ///
    /// ```
    /// use pcieipc_reduce::Op;
    /// assert_eq!(Op::Average.name().parse(), Ok(Op::Average));
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Average => "avg",
        }
    }
}

impl std::fmt::Display for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Op {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|o| o.name().eq_ignore_ascii_case(s)).ok_or_else(|| format!("no operation is called {s}"))
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that collectives take: every bit pattern is a value, so records from a peer can be stored into it.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its kind.
    const KIND: Kind;
}

macro_rules! element {
    ($($t:ty => $k:ident),*) => { $(impl sealed::Sealed for $t {} impl Element for $t { const KIND: Kind = Kind::$k; })* };
}
element!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
         u8 => U8, u16 => U16, u32 => U32, u64 => U64);
