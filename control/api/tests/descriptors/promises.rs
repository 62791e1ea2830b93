//! What an interface promises to those who were built against it, as a list that can be compared.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet, ServiceDescriptorProto,
};
use std::collections::BTreeMap;

/// By what is promised ("field 3 of a.b.Hello"): how it is.
pub(crate) type Promises = BTreeMap<String, String>;

/// Everything that must stay as it is.
pub(crate) fn promises(set: &FileDescriptorSet) -> Promises {
    let mut found = Promises::new();
    for file in &set.file {
        let package = file.package();
        for message in &file.message_type {
            of_message(package, message, &mut found);
        }
        for one in &file.enum_type {
            of_enum(package, one, &mut found);
        }
        for service in &file.service {
            of_service(package, service, &mut found);
        }
    }
    found
}

/// What was promised and is not kept, in words.
pub(crate) fn broken(before: &Promises, now: &Promises) -> Vec<String> {
    let broken = before.iter().filter_map(|(what, was)| match now.get(what) {
        None => Some(format!("{what} is gone; it was {was}")),
        Some(is) if is != was => Some(format!("{what} is {is}; it was {was}")),
        Some(_) => None,
    });
    broken.collect()
}

fn of_message(scope: &str, message: &DescriptorProto, found: &mut Promises) {
    let name = format!("{scope}.{}", message.name());
    found.insert(format!("message {name}"), "there".to_owned());
    for field in &message.field {
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        let oneof = oneof.and_then(|index| message.oneof_decl.get(index as usize));
        let oneof = oneof.map_or_else(String::new, |oneof| format!(" in oneof {}", oneof.name()));
        found.insert(format!("field {} of {name}", field.number()), of_field(field) + &oneof);
    }
    for inner in &message.nested_type {
        of_message(&name, inner, found);
    }
    for inner in &message.enum_type {
        of_enum(&name, inner, found);
    }
}

fn of_field(field: &FieldDescriptorProto) -> String {
    let kind = match field.r#type() {
        Type::Message | Type::Enum | Type::Group => field.type_name().trim_start_matches('.').to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    };
    let label = match field.label() {
        Label::Repeated => "repeated ",
        Label::Required => "required ",
        Label::Optional if field.proto3_optional() => "optional ",
        Label::Optional => "",
    };
    format!("{label}{kind} {}", field.name())
}

fn of_enum(scope: &str, one: &EnumDescriptorProto, found: &mut Promises) {
    let name = format!("{scope}.{}", one.name());
    found.insert(format!("enum {name}"), "there".to_owned());
    for value in &one.value {
        found.insert(format!("value {} of {name}", value.number()), value.name().to_owned());
    }
}

fn of_service(scope: &str, service: &ServiceDescriptorProto, found: &mut Promises) {
    let name = format!("{scope}.{}", service.name());
    for method in &service.method {
        let stream = |streams: bool| if streams { "stream " } else { "" };
        let (from, to) = (stream(method.client_streaming()), stream(method.server_streaming()));
        let types = [method.input_type(), method.output_type()].map(|name| name.trim_start_matches('.'));
        let how = format!("{from}{} -> {to}{}", types[0], types[1]);
        found.insert(format!("method {} of {name}", method.name()), how);
    }
}
