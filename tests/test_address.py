"""Addresses: one text for each, read back as it was, and no edge that runs back in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import resid_patching as rp
from resid_patching.address import (
    MLP,
    SENDERS,
    Attn,
    AttnBias,
    Edge,
    Embed,
    FinalNormBias,
    Head,
    HeadInput,
    HeadNode,
    Logits,
    MLPBias,
    MLPIn,
    Neuron,
    PosEmbed,
    Stream,
    UnembedBias,
    hook_name,
    is_by_position,
    parse,
    parse_edge,
)
from resid_patching.errors import AddressError, CausalityError, ResidPatchingError

index = st.integers(min_value=0, max_value=200)
writers = st.one_of(
    st.builds(Embed),
    st.builds(PosEmbed),
    st.builds(Attn, index),
    st.builds(AttnBias, index),
    st.builds(MLP, index),
    st.builds(MLPBias, index),
    st.builds(Head, index, index),
    st.builds(Neuron, index, index),
)
receivers = st.one_of(
    st.builds(HeadInput, index, index, st.sampled_from("qkv")),
    st.builds(MLPIn, index),
    st.builds(Logits),
    st.builds(Stream, index, st.sampled_from(["pre", "mid", "post"])),
)
others = st.one_of(
    st.builds(FinalNormBias),
    st.builds(UnembedBias),
    st.builds(HeadNode, index, index, st.sampled_from(["z", "pattern"])),
)
addresses = st.one_of(writers, receivers, others)


@given(addresses)
def test_parse_reads_what_str_writes(address):
    assert parse(str(address)) == address
    assert type(parse(str(address))) is type(address)
    assert parse(address) is address
    assert parse(f"  {address} ") == address


@given(addresses, addresses)
def test_two_addresses_have_the_same_text_only_if_they_are_the_same(left, right):
    assert (str(left) == str(right)) == (left == right and type(left) is type(right))


@given(addresses)
def test_an_address_is_a_key(address):
    assert {address: 1}[parse(str(address))] == 1


def step(place):
    """When an address acts, on one clock: what is written at a step is read from the next on."""
    if isinstance(place, Embed | PosEmbed):
        return 0
    if isinstance(place, Logits):
        return 10_000
    order = {
        HeadInput: 1,
        Attn: 2,
        AttnBias: 2,
        Head: 2,
        MLPIn: 3,
        MLP: 4,
        MLPBias: 4,
        Neuron: 4,
    }
    if isinstance(place, Stream):
        within = {"pre": 1, "mid": 3, "post": 5}[place.place]
    else:
        within = order[type(place)]
    return 10 * place.layer + within


@given(writers, receivers)
def test_an_edge_exists_exactly_where_the_receiver_acts_after_the_writer(sender, receiver):
    if step(sender) < step(receiver):
        edge = Edge(sender, receiver)
        assert parse_edge(str(edge)) == edge == parse_edge(edge)
    else:
        with pytest.raises(CausalityError, match="runs back in time"):
            Edge(sender, receiver)
        with pytest.raises(CausalityError):
            parse_edge(f"{sender}->{receiver}")


def test_the_edges_of_one_layer():
    for text in ("9.9->10.0.q", "9.9->mlp.9.in", "9.9->resid_mid.9", "mlp.9->resid_post.9"):
        assert str(rp.parse_edge(text)) == text
    for text in ("9.9->9.0.q", "9.9->resid_pre.9", "mlp.9->mlp.9.in", "mlp.9->resid_mid.9"):
        with pytest.raises(CausalityError):
            rp.parse_edge(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("blocks.6.hook_attn_out", Attn(6)),
        ("blocks.11.hook_mlp_out", MLP(11)),
        ("blocks.0.hook_resid_pre", Stream(0, "pre")),
        ("blocks.3.hook_resid_mid", Stream(3, "mid")),
        ("blocks.11.hook_resid_post", Stream(11, "post")),
        ("hook_embed", Embed()),
        ("hook_pos_embed", PosEmbed()),
        ("L9H9", Head(9, 9)),
        ("L10N2214", Neuron(10, 2214)),
    ],
)
def test_spellings_of_transformer_lens_are_read(text, address):
    assert parse(text) == address


@given(addresses)
def test_a_hook_of_an_address_names_its_layer(address):
    try:
        name = hook_name(address)
    except AddressError as error:
        assert "has no hook of its own" in str(error)
        assert isinstance(
            address, AttnBias | MLPBias | FinalNormBias | UnembedBias | Logits | MLPIn
        )
        return
    if hasattr(address, "layer"):
        assert name.startswith(f"blocks.{address.layer}.")
    assert is_by_position(name) != name.endswith("hook_pattern")


@pytest.mark.parametrize(
    "text",
    ["", "attn", "9", "9.", ".9", "-1.2", "9.9.x", "attn.x", "mlp.1.2.3", "resid_late.1"]
    + ["embed.0", "L9", "L9H", "9,9", "blocks.1.hook_nothing", "9.9->10.0.q", "attn.1.bias.2"],
)
def test_what_is_no_address_is_refused_with_the_known_forms(text):
    with pytest.raises(AddressError, match="Known forms: input, embed") as caught:
        parse(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ResidPatchingError)


@pytest.mark.parametrize("text", ["9.9", "9.9>10.0.q", "9.9 to logits"])
def test_what_is_no_edge_is_refused(text):
    with pytest.raises(AddressError, match="is no edge"):
        parse_edge(text)


@pytest.mark.parametrize("value", [-1, True])
def test_an_index_is_a_whole_number_from_0(value):
    for make in (Attn, AttnBias, MLP, MLPBias, MLPIn):
        with pytest.raises(AddressError, match="whole number from 0"):
            make(value)
    with pytest.raises(AddressError, match="head must be"):
        Head(0, value)
    with pytest.raises(AddressError, match="neuron must be"):
        Neuron(0, value)


def test_addresses_sort_by_layer_and_part():
    assert sorted([Head(1, 0), Head(0, 3), Head(0, 1)]) == [Head(0, 1), Head(0, 3), Head(1, 0)]
    assert len(SENDERS) == 9
