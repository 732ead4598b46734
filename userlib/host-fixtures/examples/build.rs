// SPDX-License-Identifier: MIT OR Apache-2.0
//! Builds the snapshot of a described host: `build HOST.toml FILE.tar.gz`.

use std::{fs::File, path::Path};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(description), Some(file)) = (arguments.next(), arguments.next()) else {
        return Err("usage: build HOST.toml FILE.tar.gz".into());
    };
    let fixture = host_fixtures::Fixture::load(Path::new(&description))?;
    let mut archive = fixture.build()?;
    if let Some(later) = fixture.build_later()? {
        archive.add_second_look(&later, 10.0);
    }
    archive.write(File::create(file)?)?;
    Ok(())
}
