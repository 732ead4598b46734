// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an operator does to PCI functions by hand, and what it takes.

mod aer;
mod endpoint;
mod function;
pub mod heal;

pub use aer::{Injector, Severity};
pub use endpoint::address_of;
pub use function::{DRIVER, Function, Sysfs};
