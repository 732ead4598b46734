// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the endpoints say of a machine that is off.

use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::control::Endpoints;
use crate::{Error, Result};

/// How long the endpoints' server may take to see that the machine is gone.
const LIMIT: Duration = Duration::from_secs(10);

/// What must be so when the machine is off.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct After {
    /// Whether the endpoints could still master the bus when the machine left them; any, if it is not said.
    pub mastering: Option<bool>,
}

impl After {
    /// Asks the endpoints' server, and says what is not so.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the server does not answer, [`Error::Silent`] if it does not see that the machine is gone.
    pub fn complaints(&self, endpoints: Option<&mut Endpoints>) -> Result<Vec<String>> {
        let (Some(wanted), Some(endpoints)) = (self.mastering, endpoints) else { return Ok(Vec::new()) };
        let deadline = Instant::now() + LIMIT;
        loop {
            let list = endpoints.request(&json!({ "cmd": "list" }))?;
            match judge(&list, wanted) {
                Some(complaints) => return Ok(complaints),
                None if Instant::now() > deadline => {
                    return Err(Error::Silent { what: "the endpoints' server, about the machine's end".into(), limit: LIMIT });
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// Nothing while the machine is not gone.
fn judge(list: &Value, wanted: bool) -> Option<Vec<String>> {
    let all = list["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
    let left: Option<Vec<bool>> = all.iter().map(|one| one["left_mastering"].as_bool()).collect();
    let wrong = left?.into_iter().enumerate().filter(|(_, mastering)| *mastering != wanted);
    let how = if wanted { "off" } else { "still on" };
    Some(wrong.map(|(index, _)| format!("endpoint {index}: bus mastering was {how} when the machine went off")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_that_still_masters_the_bus_is_a_complaint_once_the_machine_is_gone() {
        let list = |left: [Value; 2]| json!({ "endpoints": left.map(|left| json!({ "left_mastering": left })) });
        assert_eq!(judge(&list([json!(false), Value::Null]), false), None);
        assert_eq!(judge(&list([json!(false), json!(false)]), false), Some(vec![]));
        let complaints = judge(&list([json!(false), json!(true)]), false).unwrap();
        assert_eq!(complaints, ["endpoint 1: bus mastering was still on when the machine went off"]);
        assert_eq!(judge(&list([json!(false), json!(true)]), true).unwrap().len(), 1);
    }
}
