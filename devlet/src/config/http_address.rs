//! The address of the health and metrics server: `127.0.0.1:7359`, `localhost:7359`, `:7359`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The addresses to listen on, in order of preference: on a host without IPv6, `::` does not exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct HttpAddress {
    text: String,
    pub(crate) candidates: Vec<SocketAddr>,
}

/// Why a text is not an address to listen on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an address to listen on; write 127.0.0.1:7359, [::1]:7359, localhost:7359, or :7359 for all interfaces"
)]
pub(crate) struct InvalidHttpAddress(String);

impl FromStr for HttpAddress {
    type Err = InvalidHttpAddress;

    fn from_str(text: &str) -> Result<Self, InvalidHttpAddress> {
        let invalid = || InvalidHttpAddress(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let port: u16 = port.parse().map_err(|_| invalid())?;
        let ips: Vec<IpAddr> = match host {
            "" => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
            "localhost" => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            _ => {
                let address: SocketAddr = text.parse().map_err(|_| invalid())?;
                vec![address.ip()]
            }
        };
        Ok(Self {
            text: text.to_owned(),
            candidates: ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect(),
        })
    }
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<HttpAddress> for String {
    fn from(address: HttpAddress) -> Self {
        address.text
    }
}

impl TryFrom<String> for HttpAddress {
    type Error = InvalidHttpAddress;

    fn try_from(text: String) -> Result<Self, InvalidHttpAddress> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_a_host() {
        for (text, candidates) in [
            ("127.0.0.1:7359", vec!["127.0.0.1:7359"]),
            ("[::1]:7359", vec!["[::1]:7359"]),
            ("localhost:7359", vec!["127.0.0.1:7359", "[::1]:7359"]),
            (":7359", vec!["[::]:7359", "0.0.0.0:7359"]),
        ] {
            let address: HttpAddress = text.parse().unwrap();
            let read: Vec<String> = address.candidates.iter().map(ToString::to_string).collect();
            assert_eq!(read, candidates, "{text}");
            assert_eq!(address.to_string(), text);
        }
        for text in [
            "",
            "7359",
            "localhost",
            "localhost:",
            ":65536",
            "::1:7359",
            "example.org:80",
        ] {
            assert!(text.parse::<HttpAddress>().is_err(), "{text}");
        }
    }
}
