// SPDX-License-Identifier: MIT OR Apache-2.0
//! Findings about a host: what is wrong, how one knows, what it does to an all-reduce, and what to do.
//!
//! Every rule looks at a [`Case`] and is pure, so a saved host gives the findings that the live one gave. Each finding has
//! an id that stays; `docs/doctor.md` explains all of them.

mod access;
mod case;
mod catalog;
mod changes;
mod errors;
mod finding;
mod links;
mod memory_space;
mod peers;
mod presence;
mod recovery;
mod script;
mod settings;
mod unchecked;

pub use case::{Case, Moment};
pub use catalog::{CATALOG, Entry};
pub use finding::{Evidence, Finding, Fix, Report, Severity, Unchecked};
pub use script::script;

/// Runs every rule.
pub fn examine(case: &Case<'_>) -> Report {
    let look = case::Look::new(*case);
    let mut report = Report::default();
    for rule in [
        links::check,
        changes::check,
        errors::check,
        presence::check,
        recovery::check,
        peers::check,
        settings::check,
        memory_space::check,
        access::check,
        unchecked::check,
    ] {
        rule(&look, &mut report);
    }
    report.finish();
    report
}
