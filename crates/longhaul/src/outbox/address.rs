//! Which addresses may be called. Whoever submits a task names a URL, and this process stands inside
//! a network that the submitter may not reach: so only addresses of the open internet are called,
//! unless the configuration allows more.
//!
//! What counts is the address that is connected to. Names are resolved here ([`Rules`] is the HTTP
//! client's resolver) and only addresses that passed are given on, so nothing can change between
//! the check and the connection. An address in the URL itself never comes here by the resolver, so
//! whoever sends asks [`Rules::check_url`] first.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::task::Invalid;

/// A range of addresses: `10.1.0.0/16`, `fd00::/8`, or one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpRange {
    address: IpAddr,
    bits: u32,
}

impl IpRange {
    /// Whether `ip` is in it.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.address, ip) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                same_start(net.to_bits().into(), ip.to_bits().into(), 32, self.bits)
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => same_start(net.to_bits(), ip.to_bits(), 128, self.bits),
            _ => false,
        }
    }
}

/// Whether two addresses of `length` bits begin with the same `bits`.
fn same_start(one: u128, other: u128, length: u32, bits: u32) -> bool {
    (one ^ other).checked_shr(length - bits).unwrap_or(0) == 0
}

impl FromStr for IpRange {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let read = || {
            let address: IpAddr = address.trim().parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Some(most), |bits| bits.trim().parse().ok()).filter(|bits| *bits <= most)?;
            Some(Self { address, bits })
        };
        read().ok_or_else(|| {
            Invalid::new("allow", format!("has '{text}'; a range is written as 10.1.0.0/16, fd00::/8 or 10.1.2.3"))
        })
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// Why an address is not called: what kind it is.
fn kind_of(ip: IpAddr) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => kind_of_v4(ip),
        IpAddr::V6(ip) => kind_of_v6(ip),
    }
}

fn kind_of_v4(ip: Ipv4Addr) -> Option<&'static str> {
    let [a, b, c, _] = ip.octets();
    Some(match (a, b, c) {
        (0, ..) => "unspecified",
        (127, ..) => LOOPBACK,
        (10, ..) | (172, 16..=31, _) | (192, 168, _) => "private",
        (169, 254, _) => "link-local",
        (100, 64..=127, _) => "shared by a carrier's customers",
        (192, 0, 0) | (192, 88, 99) => "reserved",
        (192, 0, 2) | (198, 51, 100) | (203, 0, 113) => "for documentation",
        (198, 18..=19, _) => "for benchmarks",
        (224..=239, ..) => "multicast",
        (240..=255, ..) => "reserved or broadcast",
        _ => return None,
    })
}

fn kind_of_v6(ip: Ipv6Addr) -> Option<&'static str> {
    let [a, b, ..] = ip.segments();
    Some(match (a, b) {
        _ if ip.is_loopback() => LOOPBACK,
        _ if ip.is_unspecified() => "unspecified",
        (0xfc00..=0xfdff, _) => "private",
        (0xfe80..=0xfebf, _) => "link-local",
        (0xff00..=0xffff, _) => "multicast",
        (0x2001, 0x0db8) | (0x3fff, 0..=0x0fff) => "for documentation",
        // Teredo and other protocols of their own, which lead to addresses that cannot be seen here.
        (0x2001, 0..=0x01ff) => "reserved",
        (0x2000..=0x3fff, _) => return None,
        _ => "reserved",
    })
}

const LOOPBACK: &str = "loopback";

/// The IPv4 address that an IPv6 address stands for: mapped, NAT64 or 6to4.
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let of = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match ip.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(of(high, low)),
        // As some systems still read `::a.b.c.d`; `::` and `::1` are what they are.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => Some(of(high, low)),
        [0x2002, high, low, ..] => Some(of(high, low)),
        _ => None,
    }
}

/// What may be called.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    pub(crate) allow: Vec<IpRange>,
    pub(crate) loopback: bool,
}

impl Rules {
    /// Whether this address may be connected to; else why not.
    pub(crate) fn check(&self, ip: IpAddr) -> Result<(), Refused> {
        let meant = match ip {
            IpAddr::V6(v6) => embedded(v6).map_or(ip, IpAddr::V4),
            IpAddr::V4(_) => ip,
        };
        let allowed = |range: &IpRange| range.contains(ip) || range.contains(meant);
        match kind_of(meant) {
            None => Ok(()),
            Some(LOOPBACK) if self.loopback => Ok(()),
            Some(_) if self.allow.iter().any(allowed) => Ok(()),
            Some(kind) => Err(Refused { ip, kind }),
        }
    }

    /// The same for a URL whose host is an address. The parser has brought every spelling of one
    /// (`2130706433`, `0x7f.1`, `0177.0.0.1`) into the usual form.
    pub(crate) fn check_url(&self, url: &Url) -> Result<(), Refused> {
        let host = url.host_str().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        host.parse().map_or(Ok(()), |ip| self.check(ip))
    }
}

/// An address that must not be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address {ip} is {kind} and not allowed; if it should be, name its range in [webhook] allow")]
pub(crate) struct Refused {
    ip: IpAddr,
    kind: &'static str,
}

/// Resolves names to addresses that may be called.
pub(crate) struct Resolver(pub(crate) Arc<Rules>);

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let rules = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(pass(&rules, found)?)
        })
    }
}

/// Those of the addresses found that may be called; an error when there are only others.
fn pass(rules: &Rules, found: impl Iterator<Item = SocketAddr>) -> Result<Addrs, Refused> {
    let (mut passed, mut refused) = (Vec::new(), None);
    for address in found {
        match rules.check(address.ip()) {
            Ok(()) => passed.push(address),
            Err(why) => refused = Some(why),
        }
    }
    match refused {
        Some(why) if passed.is_empty() => Err(why),
        _ => Ok(Box::new(passed.into_iter())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rules: &Rules, url: &str) -> Result<(), Refused> {
        let url = Url::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        rules.check_url(&url)
    }

    #[test]
    fn no_spelling_of_an_inner_address_passes() {
        let rules = Rules::default();
        for host in [
            "127.0.0.1",
            "127.1",
            "127.0.0.1.",
            "127.255.255.254",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "017700000001",
            "0",
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "3232235777",
            "169.254.169.254",
            "0xa9fea9fe",
            "169.254.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "198.51.100.7",
            "203.0.113.9",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "[::]",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[::ffff:10.0.0.1]",
            "[::ffff:169.254.169.254]",
            "[::127.0.0.1]",
            "[::10.0.0.1]",
            "[64:ff9b::127.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::1]",
            "[2002:7f00:1::]",
            "[2002:a00:1::1]",
            "[2002:a9fe:a9fe::1]",
            "[fc00::1]",
            "[fd12:3456::1]",
            "[fe80::1]",
            "[febf::1]",
            "[fec0::1]",
            "[ff02::1]",
            "[2001:db8::1]",
            "[2001:0:7f00:1::]",
            "[2001:10::1]",
            "[3fff::1]",
            "[100::1]",
            "[5f00::1]",
            "[4000::1]",
        ] {
            assert!(check(&rules, &format!("http://{host}/")).is_err(), "{host}");
        }
    }

    #[test]
    fn addresses_of_the_open_internet_pass() {
        let rules = Rules::default();
        for host in [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "192.169.0.0",
            "169.253.1.1",
            "198.17.0.1",
            "198.20.0.1",
            "223.255.255.254",
            "[2606:4700::1111]",
            "[2a00:1450::1]",
            "[::ffff:8.8.8.8]",
            "[64:ff9b::8.8.8.8]",
            "[2002:808:808::1]",
            "[2001:4860:4860::8888]",
        ] {
            assert_eq!(check(&rules, &format!("http://{host}/")), Ok(()), "{host}");
        }
    }

    #[test]
    fn what_the_configuration_allows_passes_and_nothing_beside_it() {
        let allow = |text: &str| vec![text.parse().expect("a range")];
        let rules = Rules { allow: allow("10.1.0.0/16"), loopback: false };
        for (host, passes) in [
            ("10.1.2.3", true),
            ("[::ffff:10.1.2.3]", true),
            ("10.2.0.1", false),
            ("127.0.0.1", false),
            ("169.254.169.254", false),
        ] {
            assert_eq!(check(&rules, &format!("http://{host}/")).is_ok(), passes, "{host}");
        }
        let rules = Rules { allow: allow("fd00:1::/32"), loopback: false };
        assert!(check(&rules, "http://[fd00:1::5]/").is_ok() && check(&rules, "http://[fd00:2::5]/").is_err());
        let rules = Rules { allow: Vec::new(), loopback: true };
        for host in ["127.0.0.1", "127.8.9.1", "[::1]", "[::ffff:127.0.0.1]"] {
            assert!(check(&rules, &format!("http://{host}/")).is_ok(), "{host}");
        }
        assert!(check(&rules, "http://10.0.0.1/").is_err() && check(&rules, "http://0.0.0.0/").is_err());
    }

    #[test]
    fn ranges_are_read_and_their_edges_hold() {
        let range = |text: &str| text.parse::<IpRange>().expect(text);
        let ip = |text: &str| text.parse::<IpAddr>().expect(text);
        assert!(
            range("192.168.1.7").contains(ip("192.168.1.7")) && !range("192.168.1.7").contains(ip("192.168.1.8"))
        );
        assert!(range("0.0.0.0/0").contains(ip("255.1.2.3")) && range("::/0").contains(ip("ffff::1")));
        assert!(!range("0.0.0.0/0").contains(ip("::1")));
        assert!(
            range("10.0.0.0/9").contains(ip("10.127.255.255")) && !range("10.0.0.0/9").contains(ip("10.128.0.0"))
        );
        for bad in ["", "10.0.0.0/33", "::/129", "10.0.0/8", "example.com", "10.0.0.0/-1"] {
            assert!(bad.parse::<IpRange>().is_err(), "{bad}");
        }
    }

    #[test]
    fn of_the_addresses_of_a_name_only_those_that_may_be_called_are_given_on() {
        let rules = Rules::default();
        let found = |texts: &[&str]| {
            texts.iter().map(|text| SocketAddr::new(text.parse().expect(text), 0)).collect::<Vec<_>>()
        };
        let passed = pass(&rules, found(&["127.0.0.1", "1.1.1.1", "fd00::1"]).into_iter()).expect("one passes");
        assert_eq!(passed.collect::<Vec<_>>(), found(&["1.1.1.1"]));
        let refused = pass(&rules, found(&["127.0.0.1", "10.0.0.1"]).into_iter()).err().expect("refused");
        assert!(refused.to_string().contains("10.0.0.1 is private"), "{refused}");
    }
}
