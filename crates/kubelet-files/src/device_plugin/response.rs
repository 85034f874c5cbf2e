//! Decodes a plugin's stored answer as the kubelet's protobuf library does.
//!
//! On restore a kubelet drops every entry with an answer that does not decode, and the devices become free. To
//! predict which entries it drops, this decoder follows Go's rules. A known field with another wire type is kept
//! as an unknown field, not rejected. Unknown groups are skipped. Text must be UTF-8.

use devlet_kubelet_api::device_plugin::v1beta1::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// Maximum nesting of groups that Go follows: 10,000 in an outermost one.
const MAX_DEPTH: usize = 10_001;

/// Maximum field number of a message. Inside a skipped group, Go checks only that the number fits its type.
const MAX_NUMBER: u64 = (1 << 29) - 1;
const MAX_NUMBER_IN_GROUP: u64 = (1 << 31) - 1;

/// Why a stored answer does not decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    /// Truncated, or not protobuf.
    #[error("not a valid protobuf message")]
    Malformed,
    /// Protobuf text must be UTF-8.
    #[error("field {field} contains invalid UTF-8")]
    InvalidUtf8 {
        /// The field of `v1beta1.ContainerAllocateResponse`.
        field: &'static str,
    },
}

/// Decodes the bytes of [`Entry::alloc_resp`](super::Entry::alloc_resp).
pub fn decode(bytes: &[u8]) -> Result<ContainerAllocateResponse, InvalidResponse> {
    let mut response = ContainerAllocateResponse::default();
    fields(bytes, |number, value| {
        let Value::Bytes(value) = value else { return Ok(()) };
        match number {
            1 => {
                let (key, value) = map_entry(value, "envs")?;
                response.envs.insert(key, value);
            }
            2 => response.mounts.push(mount(value)?),
            3 => response.devices.push(device(value)?),
            4 => {
                let (key, value) = map_entry(value, "annotations")?;
                response.annotations.insert(key, value);
            }
            5 => {
                let mut device = CdiDevice::default();
                fields(value, |number, value| {
                    set_text(number, &value, &mut [&mut device.name], "cdi_devices")
                })?;
                response.cdi_devices.push(device);
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(response)
}

fn map_entry(bytes: &[u8], field: &'static str) -> Result<(String, String), InvalidResponse> {
    let (mut key, mut value) = (String::new(), String::new());
    fields(bytes, |number, part| {
        set_text(number, &part, &mut [&mut key, &mut value], field)
    })?;
    Ok((key, value))
}

fn mount(bytes: &[u8]) -> Result<Mount, InvalidResponse> {
    let mut mount = Mount::default();
    fields(bytes, |number, value| match (number, value) {
        (3, Value::Varint(flag)) => {
            mount.read_only = flag != 0;
            Ok(())
        }
        (number, value) => set_text(
            number,
            &value,
            &mut [&mut mount.container_path, &mut mount.host_path],
            "mounts",
        ),
    })?;
    Ok(mount)
}

fn device(bytes: &[u8]) -> Result<DeviceSpec, InvalidResponse> {
    let mut device = DeviceSpec::default();
    fields(bytes, |number, value| {
        let DeviceSpec {
            container_path,
            host_path,
            permissions,
        } = &mut device;
        set_text(
            number,
            &value,
            &mut [container_path, host_path, permissions],
            "devices",
        )
    })?;
    Ok(device)
}

/// Sets the text field with this number; `texts` are fields 1, 2 and so on. Ignores other numbers as unknown fields.
fn set_text(
    number: u64,
    value: &Value<'_>,
    texts: &mut [&mut String],
    field: &'static str,
) -> Result<(), InvalidResponse> {
    let place = usize::try_from(number)
        .ok()
        .and_then(|number| texts.get_mut(number.checked_sub(1)?));
    if let (Some(target), Value::Bytes(bytes)) = (place, value) {
        let text = std::str::from_utf8(bytes).map_err(|_| InvalidResponse::InvalidUtf8 { field })?;
        text.clone_into(target);
    }
    Ok(())
}

enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// A fixed-width number or a group: the message does not have such fields.
    Other,
}

/// Calls `field` for each field of a message.
fn fields<'a>(
    mut bytes: &'a [u8],
    mut field: impl FnMut(u64, Value<'a>) -> Result<(), InvalidResponse>,
) -> Result<(), InvalidResponse> {
    while !bytes.is_empty() {
        let (number, wire_type) = tag(&mut bytes, MAX_NUMBER)?;
        let value = match wire_type {
            0 => Value::Varint(varint(&mut bytes)?),
            2 => Value::Bytes(counted(&mut bytes)?),
            _ => {
                skip(&mut bytes, number, wire_type)?;
                Value::Other
            }
        };
        field(number, value)?;
    }
    Ok(())
}

fn tag(bytes: &mut &[u8], max: u64) -> Result<(u64, u64), InvalidResponse> {
    let tag = varint(bytes)?;
    let number = tag >> 3;
    if (1..=max).contains(&number) {
        Ok((number, tag & 7))
    } else {
        Err(InvalidResponse::Malformed)
    }
}

/// Stores a group number in 32 bits, because a hostile answer opens many groups.
fn group(number: u64) -> Result<u32, InvalidResponse> {
    u32::try_from(number).map_err(|_| InvalidResponse::Malformed)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, InvalidResponse> {
    let mut value = 0;
    for (index, &byte) in bytes.iter().take(10).enumerate() {
        // The tenth byte holds only the 64th bit.
        if index == 9 && byte > 1 {
            break;
        }
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            *bytes = &bytes[index + 1..];
            return Ok(value);
        }
    }
    Err(InvalidResponse::Malformed)
}

fn counted<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], InvalidResponse> {
    let length = usize::try_from(varint(bytes)?).map_err(|_| InvalidResponse::Malformed)?;
    let (value, rest) = bytes.split_at_checked(length).ok_or(InvalidResponse::Malformed)?;
    *bytes = rest;
    Ok(value)
}

/// Skips a value that is neither a varint nor length-delimited. Groups are skipped without recursion.
fn skip(bytes: &mut &[u8], number: u64, wire_type: u64) -> Result<(), InvalidResponse> {
    let fixed = |bytes: &mut &[u8], width: usize| {
        *bytes = bytes.get(width..).ok_or(InvalidResponse::Malformed)?;
        Ok(())
    };
    match wire_type {
        1 => return fixed(bytes, 8),
        5 => return fixed(bytes, 4),
        3 => {}
        _ => return Err(InvalidResponse::Malformed),
    }
    let mut open = vec![group(number)?];
    while let Some(&innermost) = open.last() {
        let (number, wire_type) = tag(bytes, MAX_NUMBER_IN_GROUP)?;
        match wire_type {
            0 => {
                varint(bytes)?;
            }
            1 => fixed(bytes, 8)?,
            2 => {
                counted(bytes)?;
            }
            3 if open.len() < MAX_DEPTH => open.push(group(number)?),
            4 if group(number)? == innermost => {
                open.pop();
            }
            5 => fixed(bytes, 4)?,
            _ => return Err(InvalidResponse::Malformed),
        }
    }
    Ok(())
}
