//! A crate's sources as modules: what each file defines, imports and calls. Test modules are left out.

use anyhow::{Context, Result};
use proc_macro2::Span;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Fields, File, FnArg, ImplItem, Item, Pat, Type, UseTree, Visibility};

/// A module's path below the root of its crate.
pub(super) type ModulePath = Vec<String>;
/// A type, by the module that defines it and its name.
pub(super) type TypeKey = (ModulePath, String);

/// A module, or a name in one.
type Target = (ModulePath, Option<String>);

/// How deep re-exports are followed.
const DEPTH: usize = 8;

/// A struct, enum or union.
#[derive(Debug, Clone, Default)]
pub(super) struct TypeInfo {
    /// Index of its file.
    pub(super) file: usize,
    /// The line of its definition, from 1.
    pub(super) line: usize,
    /// Fields of a struct; an enum has none.
    pub(super) fields: usize,
    /// Named fields and their types as written.
    field_types: HashMap<String, Vec<String>>,
    /// Methods of inherent impls: the file of each.
    pub(super) methods: BTreeMap<String, usize>,
}

/// An impl block.
#[derive(Debug, Clone)]
pub(super) struct ImplInfo {
    /// Index of its file.
    pub(super) file: usize,
    /// Its line, from 1.
    pub(super) line: usize,
    /// The module that it stands in.
    pub(super) module: ModulePath,
    /// The type that it is for, as written.
    of: Vec<String>,
    /// Whether it implements a trait.
    pub(super) of_trait: bool,
    /// Types of the crate that the trait is over, as `From<Other>`.
    over: Vec<Vec<String>>,
    methods: Vec<String>,
}

/// A function with a body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct FunctionInfo {
    /// Its name, behind the name of its type.
    pub(super) name: String,
    /// Its file.
    pub(super) file: PathBuf,
    /// Its line, from 1.
    pub(super) line: usize,
    /// Lines from its signature to its closing brace.
    pub(super) lines: usize,
}

/// Why one file needs another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Need {
    /// It names something of it.
    Imports,
    /// It calls a method that is implemented in it.
    Calls,
}

/// By pairs of files: what the first needs of the second, by names.
pub(super) type Needs = BTreeMap<(usize, usize), BTreeMap<Need, BTreeSet<String>>>;

#[derive(Debug, Default)]
struct Module {
    file: usize,
    /// Names that it defines.
    names: BTreeSet<String>,
    /// Names that it imports, with their paths as written.
    uses: HashMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// A path that is named somewhere.
#[derive(Debug)]
struct Named {
    file: usize,
    module: ModulePath,
    path: Vec<String>,
}

/// A call of a method on something whose type can be read.
#[derive(Debug)]
struct Call {
    file: usize,
    module: ModulePath,
    /// The type of the first of the chain, as written.
    of: Vec<String>,
    fields: Vec<String>,
    method: String,
}

/// The sources of one room.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Files, relative to the root of the workspace.
    pub(super) files: Vec<PathBuf>,
    /// The module that each file is.
    pub(super) module_of: Vec<ModulePath>,
    /// Functions with bodies.
    pub(super) functions: Vec<FunctionInfo>,
    /// Types.
    pub(super) types: BTreeMap<TypeKey, TypeInfo>,
    /// Impl blocks.
    pub(super) impls: Vec<ImplInfo>,
    modules: HashMap<ModulePath, Module>,
    named: Vec<Named>,
    calls: Vec<Call>,
}

impl Room {
    /// Reads the targets under `src` of the room at `folder`, which is relative to `root`. Each binary is a tree of its own, below
    /// a module of its name that no source can name.
    pub(super) fn read(root: &Path, folder: &Path) -> Result<Self> {
        let mut room = Self::default();
        let source = folder.join("src");
        let mut roots: Vec<(PathBuf, ModulePath)> = vec![(source.join("lib.rs"), Vec::new())];
        roots.push((source.join("main.rs"), vec!["bin main".to_owned()]));
        if let Ok(entries) = std::fs::read_dir(root.join(&source).join("bin")) {
            let mut names: Vec<_> = entries.filter_map(Result::ok).map(|entry| entry.file_name()).collect();
            names.sort();
            for name in names {
                let (file, nested) = (source.join("bin").join(&name), name.to_string_lossy().into_owned());
                let file = if nested.ends_with(".rs") { file } else { file.join("main.rs") };
                roots.push((file, vec![format!("bin {nested}")]));
            }
        }
        for (file, module) in roots {
            if root.join(&file).is_file() {
                let children = file.parent().unwrap_or(Path::new("")).to_path_buf();
                room.load(root, &file, module, children)?;
            }
        }
        room.join_methods();
        Ok(room)
    }

    fn load(&mut self, root: &Path, file: &Path, module: ModulePath, children: PathBuf) -> Result<()> {
        let shown = file.display();
        let text =
            std::fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {shown}"))?;
        let parsed: File = syn::parse_file(&text).with_context(|| format!("cannot parse {shown}"))?;
        let index = self.files.len();
        self.files.push(file.to_path_buf());
        self.module_of.push(module.clone());
        self.items(root, index, &module, &parsed.items, &children)
    }

    fn items(
        &mut self,
        root: &Path,
        file: usize,
        module: &ModulePath,
        items: &[Item],
        children: &Path,
    ) -> Result<()> {
        self.modules.insert(module.clone(), Module { file, ..Module::default() });
        for item in items {
            if tests_only(attributes(item)) {
                continue;
            }
            self.define(file, module, item);
            if let Item::Mod(inner) = item {
                let name = plain(&inner.ident.to_string());
                let below: ModulePath = module.iter().cloned().chain([name.clone()]).collect();
                match &inner.content {
                    Some((_, items)) => self.items(root, file, &below, items, &children.join(&name))?,
                    None => self.submodule(root, file, below, &inner.attrs, &children.join(&name))?,
                }
            } else {
                let mut reader = Reader { room: self, file, module, of: None, typed: Vec::new() };
                reader.visit_item(item);
            }
        }
        Ok(())
    }

    /// Loads what `mod name;` stands for; what is made by a build is not there.
    fn submodule(
        &mut self,
        root: &Path,
        file: usize,
        module: ModulePath,
        attrs: &[Attribute],
        place: &Path,
    ) -> Result<()> {
        if let Some(named) = path_attribute(attrs) {
            let folder = self.files.get(file).and_then(|file| file.parent()).unwrap_or(Path::new(""));
            let path = folder.join(named);
            let children = path.parent().unwrap_or(Path::new("")).to_path_buf();
            return if root.join(&path).is_file() {
                self.load(root, &path, module, children)
            } else {
                Ok(())
            };
        }
        let candidates = [place.with_extension("rs"), place.join("mod.rs")];
        match candidates.iter().find(|path| root.join(path).is_file()) {
            Some(path) => self.load(root, path, module, place.to_path_buf()),
            None => Ok(()),
        }
    }

    /// Notes what an item defines or imports.
    fn define(&mut self, file: usize, module: &ModulePath, item: &Item) {
        let mut types = None;
        let name = match item {
            Item::Struct(item) => {
                types = Some(type_info(file, Some(&item.fields), &item.ident));
                Some(&item.ident)
            }
            Item::Enum(item) => {
                types = Some(type_info(file, None, &item.ident));
                Some(&item.ident)
            }
            Item::Union(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Const(item) => Some(&item.ident),
            Item::Static(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::TraitAlias(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Macro(item) => item.ident.as_ref(),
            _ => None,
        };
        if let (Some(name), Some(info)) = (name, types) {
            self.types.insert((module.clone(), name.to_string()), info);
        }
        let Some(known) = self.modules.get_mut(module) else { return };
        known.names.extend(name.map(|name| plain(&name.to_string())));
        if let Item::Use(import) = item {
            let mut leaves = Vec::new();
            flatten(&import.tree, &mut Vec::new(), &mut leaves);
            for (path, name) in leaves {
                // What is exported anew is offered, not needed.
                if matches!(import.vis, Visibility::Inherited) {
                    let (module, path) = (module.clone(), path.clone());
                    self.named.push(Named { file, module, path });
                }
                match name {
                    Some(name) => {
                        known.uses.insert(name, path);
                    }
                    None => known.globs.push(path),
                }
            }
        }
    }

    fn join_methods(&mut self) {
        let found: Vec<(TypeKey, usize, Vec<String>)> = self
            .impls
            .iter()
            .filter(|block| !block.of_trait)
            .filter_map(|block| {
                Some((self.type_named(&block.module, &block.of)?, block.file, block.methods.clone()))
            })
            .collect();
        for (key, file, methods) in found {
            if let Some(info) = self.types.get_mut(&key) {
                info.methods.extend(methods.into_iter().map(|name| (name, file)));
            }
        }
    }

    /// The type of the crate that an impl is for.
    pub(super) fn implemented(&self, block: &ImplInfo) -> Option<TypeKey> {
        self.type_named(&block.module, &block.of)
    }

    /// The types of the crate that the trait of an impl is over.
    pub(super) fn over(&self, block: &ImplInfo) -> Vec<TypeKey> {
        block.over.iter().filter_map(|path| self.type_named(&block.module, path)).collect()
    }

    fn type_named(&self, module: &ModulePath, path: &[String]) -> Option<TypeKey> {
        let (module, name) = self.resolve(module, path, DEPTH)?;
        let key = (module, name?);
        self.types.contains_key(&key).then_some(key)
    }

    /// Where a path leads, as written in a module. It leads to a module of the crate, or to a name in one.
    fn resolve(&self, module: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            // A binary's root is the module of its name.
            "crate" => module.first().filter(|name| name.starts_with("bin ")).cloned().into_iter().collect(),
            "self" => module.clone(),
            "super" => module.split_last()?.1.to_vec(),
            _ => return self.within(module, path, depth),
        };
        while let Some((next, more)) =
            rest.split_first().filter(|(next, _)| *next == "super" || *next == "self")
        {
            if next == "super" {
                at.pop();
            }
            rest = more;
        }
        if rest.is_empty() { Some((at, None)) } else { self.within(&at, rest, depth) }
    }

    /// Where a path leads that begins with a name of a module.
    fn within(&self, module: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        let (first, rest) = path.split_first()?;
        let known = self.modules.get(module)?;
        let below: ModulePath = module.iter().cloned().chain([first.clone()]).collect();
        if self.modules.contains_key(&below) {
            return match rest {
                [] => Some((below, None)),
                [name] if name == "*" => Some((below, None)),
                _ => self.within(&below, rest, depth).or(Some((below, None))),
            };
        }
        if known.names.contains(first) {
            return Some((module.clone(), Some(first.clone())));
        }
        if let Some(import) = known.uses.get(first).filter(|import| import.as_slice() != path) {
            let path: Vec<String> = import.iter().chain(rest).cloned().collect();
            return self.resolve(module, &path, depth);
        }
        known.globs.iter().find_map(|glob| {
            let (to, _) =
                self.resolve(module, glob, depth).filter(|(to, name)| name.is_none() && to != module)?;
            self.modules.get(&to)?.names.contains(first).then(|| (to, Some(first.clone())))
        })
    }

    /// Which file needs which other, why, and by what name.
    pub(super) fn needs(&self) -> Needs {
        let mut needs = Needs::new();
        let mut note = |from: usize, to: usize, need: Need, name: String| {
            if from != to {
                needs.entry((from, to)).or_default().entry(need).or_default().insert(name);
            }
        };
        for Named { file, module, path } in &self.named {
            let Some((to, name)) = self.resolve(module, path, DEPTH) else { continue };
            let Some(target) = self.modules.get(&to) else { continue };
            let name = name.or_else(|| to.last().cloned()).unwrap_or_else(|| "crate".to_owned());
            note(*file, target.file, Need::Imports, name);
        }
        for call in &self.calls {
            let Some(mut key) = self.type_named(&call.module, &call.of) else { continue };
            for field in &call.fields {
                let next = self.types.get(&key).and_then(|info| info.field_types.get(field));
                match next.and_then(|path| self.type_named(&key.0, path)) {
                    Some(next) => key = next,
                    None => {
                        key.1.clear();
                        break;
                    }
                }
            }
            let file = self.types.get(&key).and_then(|info| info.methods.get(&call.method));
            if let Some(file) = file {
                note(call.file, *file, Need::Calls, format!("{}::{}", key.1, call.method));
            }
        }
        needs
    }
}

/// Reads what stands in one item.
struct Reader<'a> {
    room: &'a mut Room,
    file: usize,
    module: &'a ModulePath,
    /// The type whose impl this is in, as written.
    of: Option<Vec<String>>,
    /// Parameters of the function this is in, with their types as written.
    typed: Vec<(String, Vec<String>)>,
}

impl Reader<'_> {
    fn function(&mut self, signature: &syn::Signature, span: Span) {
        let name = signature.ident.to_string();
        let of = self.of.as_ref().and_then(|of| of.last());
        let name = of.map_or(name.clone(), |of| format!("{of}::{name}"));
        let from = line(signature.fn_token.span());
        let lines = (span.end().line + 1).saturating_sub(from);
        let file = self.room.files.get(self.file).cloned().unwrap_or_default();
        self.room.functions.push(FunctionInfo { name, file, line: from, lines });
        self.typed = Vec::new();
        for input in &signature.inputs {
            if let FnArg::Typed(input) = input
                && let Pat::Ident(name) = &*input.pat
                && let Some(path) = path_of(&input.ty)
            {
                self.typed.push((name.ident.to_string(), path));
            }
        }
    }

    /// The type of what a chain of fields begins with, and the fields.
    fn chain(&self, receiver: &Expr) -> Option<(Vec<String>, Vec<String>)> {
        match receiver {
            Expr::Path(path) => {
                let name = path.path.get_ident()?.to_string();
                let of = match name.as_str() {
                    "self" => self.of.clone()?,
                    _ => self.typed.iter().find(|(known, _)| *known == name)?.1.clone(),
                };
                Some((of, Vec::new()))
            }
            Expr::Field(field) => {
                let (of, mut fields) = self.chain(&field.base)?;
                let syn::Member::Named(name) = &field.member else { return None };
                fields.push(name.to_string());
                Some((of, fields))
            }
            Expr::Reference(inner) => self.chain(&inner.expr),
            Expr::Paren(inner) => self.chain(&inner.expr),
            _ => None,
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_impl(&mut self, block: &'ast syn::ItemImpl) {
        if tests_only(&block.attrs) {
            return;
        }
        let of = path_of(&block.self_ty);
        if let Some(of) = &of {
            let methods = block.items.iter().filter_map(|item| match item {
                ImplItem::Fn(function) if !tests_only(&function.attrs) => {
                    Some(function.sig.ident.to_string())
                }
                _ => None,
            });
            let mut over = Vec::new();
            if let Some((_, path, _)) = &block.trait_ {
                let mut types = TypePaths(&mut over);
                types.visit_path(path);
            }
            self.room.impls.push(ImplInfo {
                file: self.file,
                line: line(block.impl_token.span()),
                module: self.module.clone(),
                of: of.clone(),
                of_trait: block.trait_.is_some(),
                over,
                methods: methods.collect(),
            });
        }
        self.of = of;
        visit::visit_item_impl(self, block);
        self.of = None;
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !tests_only(&function.attrs) {
            self.function(&function.sig, function.span());
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        if !tests_only(&function.attrs) {
            self.function(&function.sig, function.span());
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if let Some((of, fields)) = self.chain(&call.receiver) {
            let (module, method) = (self.module.clone(), call.method.to_string());
            self.room.calls.push(Call { file: self.file, module, of, fields, method });
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| plain(&part.ident.to_string())).collect();
        if names.len() > 1 && path.leading_colon.is_none() {
            self.room.named.push(Named { file: self.file, module: self.module.clone(), path: names });
        }
        visit::visit_path(self, path);
    }
}

/// The types that a path is over.
struct TypePaths<'a>(&'a mut Vec<Vec<String>>);

impl<'ast> Visit<'ast> for TypePaths<'_> {
    fn visit_type(&mut self, found: &'ast Type) {
        self.0.extend(path_of(found));
        visit::visit_type(self, found);
    }
}

/// A struct with its fields, or an enum.
fn type_info(file: usize, fields: Option<&Fields>, name: &syn::Ident) -> TypeInfo {
    let fields: Vec<&syn::Field> = fields.into_iter().flatten().collect();
    let named =
        fields.iter().filter_map(|field| Some((field.ident.as_ref()?.to_string(), path_of(&field.ty)?)));
    let field_types = named.collect();
    TypeInfo { file, line: line(name.span()), fields: fields.len(), field_types, methods: BTreeMap::new() }
}

/// The path of a type as written, behind references and owning pointers.
fn path_of(found: &Type) -> Option<Vec<String>> {
    match found {
        Type::Reference(inner) => path_of(&inner.elem),
        Type::Paren(inner) => path_of(&inner.elem),
        Type::Group(inner) => path_of(&inner.elem),
        Type::Path(path) => {
            let last = path.path.segments.last()?;
            if let syn::PathArguments::AngleBracketed(arguments) = &last.arguments
                && ["Box", "Arc", "Rc"].iter().any(|name| last.ident == name)
                && let Some(syn::GenericArgument::Type(inner)) = arguments.args.first()
            {
                return path_of(inner);
            }
            Some(path.path.segments.iter().map(|part| plain(&part.ident.to_string())).collect())
        }
        _ => None,
    }
}

fn plain(name: &str) -> String {
    name.strip_prefix("r#").unwrap_or(name).to_owned()
}

fn line(span: Span) -> usize {
    span.start().line
}

/// Each path of a tree of imports with the name that it gives. The name is none where the path gives all
/// names of a module.
fn flatten(tree: &UseTree, before: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, Option<String>)>) {
    let with = |before: &[String], name: &syn::Ident| -> Vec<String> {
        before.iter().cloned().chain([plain(&name.to_string())]).collect()
    };
    match tree {
        UseTree::Path(path) => {
            before.push(plain(&path.ident.to_string()));
            flatten(&path.tree, before, leaves);
            before.pop();
        }
        UseTree::Name(name) if name.ident == "self" => leaves.push((before.clone(), before.last().cloned())),
        UseTree::Name(name) => leaves.push((with(before, &name.ident), Some(plain(&name.ident.to_string())))),
        UseTree::Rename(renamed) if renamed.ident == "self" => {
            leaves.push((before.clone(), Some(renamed.rename.to_string())));
        }
        UseTree::Rename(renamed) => {
            leaves.push((with(before, &renamed.ident), Some(plain(&renamed.rename.to_string()))));
        }
        UseTree::Glob(_) => leaves.push((before.clone(), None)),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, leaves)),
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether an item is there for tests alone.
fn tests_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            let mut words = condition.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            words.clone().any(|word| word == "test") && words.all(|word| word != "not")
        }
        _ => false,
    })
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}
