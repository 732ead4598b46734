// SPDX-License-Identifier: MIT OR Apache-2.0
//! The module, as far as it can be reached from here, and if not, what is missing.

use std::path::Path;

use pcieipc::device::{DeviceError, EndpointInfo, NODE, Node, State};

const LOADED: &str = "/sys/module/pcieipc";

/// What stands between this process and the module.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The module is there, its node is not.
    #[error("the module pcieipc is loaded, but {NODE} does not exist: mount devtmpfs on /dev, or give the container the node")]
    NoNode,
    /// Anything else that the library tells.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Opens the node.
pub fn open() -> Result<Node, Obstacle> {
    obstacle(Node::open(), Path::new(LOADED))
}

fn obstacle(opened: Result<Node, DeviceError>, loaded: &Path) -> Result<Node, Obstacle> {
    match opened {
        Err(DeviceError::NotLoaded { .. }) if loaded.exists() => Err(Obstacle::NoNode),
        other => Ok(other?),
    }
}

/// The module's own version, as modinfo tells it.
pub fn version() -> Option<String> {
    let text = std::fs::read_to_string(Path::new(LOADED).join("version")).ok()?;
    Some(text.trim().to_owned())
}

/// All endpoints. Those that go while they are listed are left out.
pub fn endpoints(node: &Node) -> Result<Vec<EndpointInfo>, DeviceError> {
    let mut found = Vec::new();
    for id in node.endpoints()? {
        match node.endpoint(id) {
            Ok(info) => found.push(info),
            Err(DeviceError::NoEndpoint(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Whether a session could attach.
pub fn is_free(endpoint: &EndpointInfo) -> bool {
    endpoint.state == State::Live && !endpoint.attached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_there() -> Result<Node, DeviceError> {
        Err(DeviceError::NotLoaded { path: NODE.into() })
    }

    #[test]
    fn a_missing_node_without_the_module_says_how_to_load_it() {
        let obstacle = obstacle(not_there(), Path::new("/nonexistent/module")).unwrap_err();
        assert!(obstacle.to_string().contains("modprobe pcieipc"), "{obstacle}");
    }

    #[test]
    fn a_missing_node_with_the_module_does_not_tell_to_load_it() {
        let obstacle = obstacle(not_there(), Path::new("/proc")).unwrap_err();
        assert!(matches!(obstacle, Obstacle::NoNode), "{obstacle}");
    }
}
