"""Trains the demo model that ships with the library, and measures it.

    python scripts/train_demo.py --out resid_patching/demo         # train, measure, write
    python scripts/train_demo.py --evaluate resid_patching/demo    # measure the saved files again

One file, nothing downloaded: a grammar writes the text, a byte-level BPE tokenizer is trained on
it, and a small model of GPT-2's architecture is trained to predict it. Most sentences have an
indirect object whose name follows from the names before it ("When Mary and John went to the store,
John gave a drink to Mary."); a share of the rows is a random sequence said again and again. Some
combinations of two names and a place are never trained on; the figures come from these alone.

Everything random comes from ``--seed`` (weights and training text) or from the constants below
(tokenizer, held-out combinations, evaluation text), so runs with different seeds are measured on
the same prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

BOS = "<|endoftext|>"
CONTEXT = 128
D_VOCAB = 1200
GRAMMAR_SEED = 20
EVALUATION_SEED = 21
N_PROMPTS, N_SEQUENCES, N_DOCUMENTS = 2000, 200, 500  # that the card's figures come from
HELD_OUT_SHARE = 0.05
INDUCTION_SHARE = 0.25
NO_BOS_SHARE = 0.15
SHORT_SHARE = 0.35  # of the steps, the first ones, have short rows
INITIAL_SCALE = 0.06  # 1 / sqrt(d_model), less a little; GPT-2's own 0.02 suits a wider model
IGNORED = -100  # the label that cross_entropy leaves out

WOMEN = (
    "Alice Amanda Amber Amy Angela Anna Chloe Clara Diana Ella Emily Emma Erin Eva Grace Hannah "
    "Helen Jane Jennifer Jessica Julia Kate Kelly Laura Lily Lisa Lucy Maria Mary Megan Molly "
    "Nancy Nina Olivia Rachel Rose Ruth Sarah Sophie Susan"
).split()
MEN = (
    "Adam Andrew Ben Bill Bob Brian Carl Charlie Dan Daniel David Eric Frank Fred George Greg "
    "Harry Henry Jack James Jason John Joseph Kevin Luke Mark Martin Max Michael Nick Oscar Paul "
    "Peter Richard Robert Sam Sid Simon Tim Tom"
).split()
NAMES = sorted(WOMEN + MEN)
PLACES = (
    "store park shop shops school garden library market beach station kitchen office house "
    "restaurant hospital museum farm river lake bakery cafe zoo theater church castle bridge "
    "hotel forest village party"
).split()

LEXICON = {
    "noun": (
        "drink bag ball book apple ring letter key map toy hat coat cake box flower lamp phone "
        "pen gift bone snack computer basketball necklace orange egg picture ticket blanket "
        "basket bottle card watch coin shirt sandwich guitar kite chair"
    ).split(),
    "portion": (
        "bottle of milk|bottle of water|glass of water|glass of milk|cup of tea|cup of coffee|"
        "box of eggs|basket of fruit|bag of rice|bag of apples|piece of cake|piece of bread|"
        "piece of cheese|plate of food"
    ).split("|"),
    "mass": "milk bread eggs water tea coffee food fruit cheese rice apples cake".split(),
    "adj": (
        "red blue green small big old new heavy yellow nice pretty broken little white black"
    ).split(),
    "mood": "tired happy hungry sad angry late early excited cold bored thirsty busy".split(),
    "state": "busy quiet open closed full empty crowded warm cold beautiful noisy".split(),
    "weather": ["raining", "snowing", "sunny", "windy", "cold", "dark", "warm", "late"],
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "time": ["morning", "afternoon", "evening", "autumn", "summer", "winter", "spring"],
    "animal": "dog cat horse bird rabbit duck cow sheep".split(),
    "activity": "working talking playing reading singing dancing cooking eating waiting".split(),
    "job": "teacher doctor baker farmer driver writer singer painter nurse".split(),
    "move": ["went", "walked", "ran", "drove", "came"],
    "give": "gave gave gave gave handed passed sent showed offered brought lent sold threw".split(),
    "give_plain": "give give hand pass send show offer bring lend sell throw".split(),
    "plan": ["decided to", "wanted to", "had to", "tried to", "was able to", "forgot to"],
    "speak": (
        "said hello to|wrote a letter to|told a story to|read a book to|sang a song to|"
        "waved to|talked to|whispered to|pointed to|said goodbye to"
    ).split("|"),
}

# ---- the sentences -------------------------------------------------------------------------------
# The sentences. {A} and {B} are the pair, {C} stands by, {P} and {Q} are the places. {he} {his}
# {He} {His} go with A, {bhe} with B. Any other field is drawn from the lexicon, anew each time.

TAILS = ["", "", "", "", " in the {time}", " on {day}", " with the {animal}", " to buy {mass}",
         " with a {adj} {noun}", " for the first time"]  # fmt: skip
CLAUSES = [
    "When {A} and {B} {move} to the {P}{tail}, ",
    "When {A} and {B} {move} to the {P}{tail}, ",
    "When {A} and {B} went to the {P}, ",
    "After {A} and {B} {move} to the {P}{tail}, ",
    "While {A} and {B} were {activity} at the {P}{tail}, ",
    "While {A} and {B} were at the {P}{tail}, ",
    "When {A} met {B} at the {P}{tail}, ",
    "When {A} saw {B} near the {P}, ",
    "As soon as {A} and {B} left the {P}, ",
    "Before {A} and {B} {move} to the {P}{tail}, ",
    "Then {A} and {B} {move} to the {P}{tail}, and ",
    "Because {A} and {B} were {mood} at the {P}, ",
    "In the {time}, {A} was with {B} at the {P}, and ",
]
STATEMENTS = [
    "{A} and {B} {move} to the {P}{tail}. ",
    "Then, {A} and {B} {move} to the {P}{tail}. ",
    "{A} and {B} were {activity} at the {P}{tail}. ",
    "{A} met {B} at the {P}{tail}. ",
    "{A} met with {B} near the {P}. ",
    "One {time}, {A} and {B} were at the {P}{tail}. ",
    "Last {day}, {A} took {B} to the {P}. ",
    "It was {weather}. {A} and {B} were still at the {P}. ",
    "At the {P}, {A} sat next to {B}. ",
    "{A} lived near the {P}, and so did {B}. ",
]
ASIDES = [
    "The {P} was {state}. ",
    "It was {weather} that {time}. ",
    "Both of them were {mood}. ",
    "They had a {adj} {noun} and some {mass}. ",
    "They talked about {thing} for a long time. ",
    "{A} was {mood}. ",
    "{B} was {mood}. ",
    "{A} looked for {thing}. ",
    "{B} looked for {thing}. ",
    "{A} bought {thing}, because {he} liked it. ",
    "{B} found {thing} under the {noun}. ",
]
LINKS = ["", "", "", "", "Then ", "Later, ", "In the end, ", "After that, ", "That {time}, "]
ENDINGS = [".", ".", ".", ".", " and smiled.", " before it got dark.", " because it was {weather}.",
           " with a smile.", " and left the {P}.", " in the {time}."]  # fmt: skip
THANKS = [
    " {R} thanked {S}.",
    " {R} was {mood}, but {S} was not.",
    " {R} put the {noun} on the {noun}.",
    " {S} and {R} went home.",
    " They were both {mood}.",
    " It was a {adj} {noun}.",
]
STORY = [
    "{A} lived near the {P}.",
    "{A} was a {job} and worked at the {P}.",
    "{A} had a {adj} {animal}, and {he} liked it very much.",
    "{He} was {mood}, so {he} went to the {Q}.",
    "Every {time}, {he} {move} to the {Q} with {his} {animal}.",
    "One {day}, {he} found {thing} near the {Q}.",
    "{His} friend {B} was a {job}.",
    "{B} came to the {P} because {bhe} wanted {thing}.",
    "{A} asked {B} for {thing}.",
    "{B} said that {bhe} was {mood}, and {A} went home.",
    "Was the {animal} {mood}? No, it was {activity}!",
    "The {noun} was {adj}, but the {noun} was {adj}.",
    "{He} could not find {his} {noun}.",
    "{He} ate {mass} and went to bed.",
    "It was {weather}, and the {Q} was {state}.",
    "They sat near the {P} and ate some {mass}.",
]


@dataclass(frozen=True)
class Scene:
    """Who is where: the pair of a document, a bystander, the place and another place."""

    pair: tuple[str, str]
    bystander: str
    places: tuple[str, str]

    @property
    def combinations(self) -> list[tuple[str, str, str]]:
        """Every (name, name, place) that this scene brings together, names in order."""
        people = sorted((*self.pair, self.bystander))
        return [(a, b, place) for a, b in combinations(people, 2) for place in self.places]


@dataclass(frozen=True)
class Prompt:
    """Text up to the indirect object, the name that follows and the name that does not."""

    text: str
    recipient: str
    giver: str
    order: str  # "ABB": the giver was named second; "BAB": the giver was named first


class Fields(dict[str, str]):
    """The fields of a scene for ``str.format_map``; a missing field is drawn from the lexicon."""

    def __init__(self, rng: random.Random, scene: Scene) -> None:
        """Fills in the people and places of ``scene``; ``rng`` draws the rest when asked."""
        (a, b), (place, other) = scene.pair, scene.places
        he, his = ("she", "her") if a in WOMEN else ("he", "his")
        super().__init__(
            A=a, B=b, C=scene.bystander, P=place, Q=other, he=he, his=his,
            He=he.title(), His=his.title(), bhe="she" if b in WOMEN else "he",
        )  # fmt: skip
        self.rng = rng

    def __missing__(self, field: str) -> str:
        """Draws a word for ``field``."""
        if field == "tail":
            return self.fill(TAILS)
        if field == "thing":
            return self.thing()
        return self.rng.choice(LEXICON[field])

    def fill(self, templates: Sequence[str]) -> str:
        """One of the templates, filled in."""
        return self.rng.choice(templates).format_map(self)

    def thing(self) -> str:
        """A noun phrase: "a drink", "the red book", "a bottle of milk", "some bread"."""
        kind = self.rng.random()
        if kind < 0.1:
            return self.fill(["some {mass}"])
        if kind < 0.25:
            return self.fill(["a {portion}", "the {portion}"])
        if kind < 0.45:
            words = self.fill(["{adj} {noun}"])
        else:
            words = self.fill(["{noun}"])
        article = "the" if self.rng.random() < 0.4 else "an" if words[0] in "aeo" else "a"
        return f"{article} {words}"

    def act(self) -> str:
        """What the giver does, up to the recipient: "gave a drink to", "said hello to"."""
        kind = self.rng.random()
        if kind < 0.15:
            return self.fill(["{speak}"])
        if kind < 0.3:
            return self.fill(["{plan} {give_plain} {thing} to"])
        return self.fill(["{give} {thing} to"])


def hold_out_combinations() -> frozenset[tuple[str, str, str]]:
    """The (name, name, place) combinations that no training document brings together."""
    every = [(a, b, place) for a, b in combinations(NAMES, 2) for place in PLACES]
    chosen = random.Random(GRAMMAR_SEED).sample(every, int(len(every) * HELD_OUT_SHARE))
    return frozenset([*chosen, ("John", "Mary", "store")])


HELD_OUT = hold_out_combinations()
HELD_OUT_IN_ORDER = sorted(HELD_OUT)


def draw_scene(rng: random.Random, held_out: bool) -> Scene:
    """A scene whose pair and place are held out, or one without any held-out combination."""
    while True:
        a, b, c = rng.sample(NAMES, 3)
        place, other = rng.sample(PLACES, 2)
        if held_out:
            first, second, place = rng.choice(HELD_OUT_IN_ORDER)
            a, b = rng.sample([first, second], 2)
        scene = Scene((a, b), c, (place, other))
        well_formed = len({a, b, c}) == 3 and place != other
        if well_formed and (held_out or HELD_OUT.isdisjoint(scene.combinations)):
            return scene


def write_prompt(rng: random.Random, scene: Scene, fields: Fields) -> Prompt:
    """An opening that names the pair, then one of them giving something to the other."""
    if rng.random() < 0.55:
        opening = fields.fill(CLAUSES)
    else:
        opening = fields.fill(STATEMENTS)
        if rng.random() < 0.4:
            opening += fields.fill(ASIDES)
        opening += fields.fill(LINKS)
    giver_was_second = rng.random() < 0.5
    recipient, giver = scene.pair if giver_was_second else scene.pair[::-1]
    order = "ABB" if giver_was_second else "BAB"
    return Prompt(f"{opening}{giver} {fields.act()}", recipient, giver, order)


def write_gift(rng: random.Random, scene: Scene, fields: Fields) -> str:
    """An indirect-object document, perhaps with thanks and with a second gift."""
    prompt = write_prompt(rng, scene, fields)
    fields.update(S=prompt.giver, R=prompt.recipient)
    text = f"{prompt.text} {prompt.recipient}" + fields.fill(ENDINGS)
    if rng.random() < 0.25:
        text += fields.fill(THANKS)
    if rng.random() < 0.35:
        giver, recipient = rng.sample(scene.pair, 2)
        text += " " + fields.fill(LINKS) + f"{giver} {fields.act()} {recipient}"
        text += fields.fill(ENDINGS)
    return text


def write_crowd(rng: random.Random, scene: Scene, fields: Fields) -> str:
    """Three people: a stranger gives to one of the pair, or one of three to another."""
    if rng.random() < 0.5:
        recipient = rng.choice(scene.pair)
        opening, giver = fields.fill(CLAUSES), scene.bystander
    else:
        giver, recipient, _ = rng.sample((*scene.pair, scene.bystander), 3)
        opening = fields.fill(["{A}, {B} and {C} {move} to the {P}{tail}. "])
    if rng.random() < 0.15:
        return f"{opening}{giver} gave {recipient} {fields.thing()}."
    return f"{opening}{giver} {fields.act()} {recipient}" + fields.fill(ENDINGS)


def write_story(rng: random.Random, scene: Scene, fields: Fields) -> str:
    """A few sentences on one person, with pronouns."""
    sentences = [rng.choice(STORY[:3]), *rng.sample(STORY[3:], rng.randint(1, 4))]
    return " ".join(sentence.format_map(fields) for sentence in sentences)


def write_document(rng: random.Random, held_out: bool) -> str:
    """A document of the grammar."""
    scene = draw_scene(rng, held_out)
    writers = [write_gift, write_crowd, write_story]
    (writer,) = rng.choices(writers, weights=[0.75, 0.08, 0.17])
    return writer(rng, scene, Fields(rng, scene))


def words_with_space() -> list[str]:
    """The words that must be one token each when a space precedes them."""
    phrases = [word for words in LEXICON.values() for word in words]
    return sorted({w for p in (*phrases, *PLACES, *NAMES) for w in p.split()})


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE like GPT-2's, trained on the grammar's own text and word list."""
    rng = random.Random(GRAMMAR_SEED)
    lexicon = " " + " ".join(words_with_space())
    corpus = [write_document(rng, held_out=False) for _ in range(20_000)] + [lexicon] * 500
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=D_VOCAB,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    split = [w for w in words_with_space() if len(tokenizer.encode(" " + w).ids) != 1]
    if split:
        raise ValueError(f"{len(split)} words are not one token, raise D_VOCAB: {split[:10]}")
    return tokenizer


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and, at each position, the token to predict (or ``IGNORED``)."""

    tokens: Tensor  # int64 "batch pos"
    labels: Tensor  # int64 "batch pos"


class TrainingText:
    """An endless stream of training rows: packed documents, and repeated random sequences."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """The rows that ``seed`` gives, in the tokens of ``tokenizer``."""
        self.rng = random.Random(seed)
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text).ids
        self.bos = tokenizer.token_to_id(BOS)
        self.everything = [t for t in range(tokenizer.get_vocab_size()) if t != self.bos]
        self.words = [tokenizer.encode(" " + word).ids[0] for word in words_with_space()]

    def batch(self, n_rows: int, length: int) -> Batch:
        """``n_rows`` rows of ``length`` tokens; most begin with BOS."""
        rows = [self._row(length + 1) for _ in range(n_rows)]
        tokens = torch.tensor([tokens for tokens, _ in rows])
        labels = tokens[:, 1:].clone()
        for row, (_, n_unpredictable) in enumerate(rows):
            labels[row, :n_unpredictable] = IGNORED
        return Batch(tokens[:, :-1], labels)

    def _row(self, length: int) -> tuple[list[int], int]:
        """A row, and how many of its first labels nothing could predict."""
        start = [] if self.rng.random() < NO_BOS_SHARE else [self.bos]
        if self.rng.random() < INDUCTION_SHARE:
            return self._repetition(start, length)
        row = start
        while len(row) < length:
            row += [*self.encode(write_document(self.rng, held_out=False)), self.bos]
        return row[:length], 0

    def _repetition(self, start: list[int], length: int) -> tuple[list[int], int]:
        choices = self.words if self.rng.random() < 0.3 else self.everything
        n = min(self.rng.randint(4, length // 2), self.rng.randint(4, length // 2))
        period = self.rng.choices(choices, k=n)
        row = start + period * (length // len(period) + 1)
        return row[:length], len(start) + len(period)


def build_model(tokenizer: Tokenizer, seed: int) -> GPT2LMHeadModel:
    """A freshly initialised model of GPT-2's architecture with its own unembedding."""
    bos = tokenizer.token_to_id(BOS)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        # The function that GPT-2 calls gelu_new, in one kernel; save_model writes GPT-2's name.
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=INITIAL_SCALE,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=bos,
    )
    torch.manual_seed(seed)  # transformers initialises from the global generator alone
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(waves(CONTEXT, config.n_embd) * INITIAL_SCALE)
    return model


def waves(n_positions: int, d_model: int) -> Tensor:
    """Sines and cosines of the position, mean square 1: float32 "position d_model".

    The first value of the position embedding: from here "the token before" is one rotation away.
    Training is free to change it.
    """
    frequencies = torch.logspace(0, -3, d_model // 2, base=10)
    angles = torch.arange(n_positions)[:, None] * frequencies
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)


def learning_rate_factor(step: int, n_steps: int) -> float:
    """Linear warm-up, a long plateau (the abilities come late and at once), linear decay."""
    warmup, decay = min(200, n_steps // 4 + 1), 0.35 * n_steps
    return min(1.0, (step + 1) / warmup, (n_steps - step) / decay)


def batch_shape(step: int, n_steps: int) -> tuple[int, int]:
    """How many rows of how many tokens: short rows first, then longer ones.

    Looking back is learned from short rows much sooner, since attention that is still uniform
    spreads over fewer tokens. Later, every fourth step trains every position.
    """
    if step <= SHORT_SHARE * n_steps:
        return 64, CONTEXT // 4
    return (32, CONTEXT) if step % 4 == 0 else (64, CONTEXT // 2)


def train(model: GPT2LMHeadModel, tokenizer: Tokenizer, args: argparse.Namespace) -> int:
    """Trains the model in place and returns the number of tokens it saw."""
    text = TrainingText(tokenizer, args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps)
    )
    n_tokens, losses, began = 0, [], time.monotonic()
    for step in range(1, args.steps + 1):
        batch = text.batch(*batch_shape(step, args.steps))
        logits = model(batch.tokens).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        n_tokens += batch.tokens.numel()
        losses.append(loss.item())
        if step % args.log_every == 0 or step == args.steps:
            print(progress(model, tokenizer, step, sum(losses) / len(losses), began), flush=True)
            losses.clear()
    return n_tokens


def progress(
    model: GPT2LMHeadModel, tokenizer: Tokenizer, step: int, loss: float, began: float
) -> str:
    """One line on how the training goes."""
    gifts = measure_indirect_object(model, tokenizer, n_prompts=200, with_bos=True)
    induction = measure_induction(model, tokenizer, n_rows=32, period=10, with_bos=True)
    return (
        f"step {step:5d}  loss {loss:.3f}  indirect object {gifts.accuracy:6.1%}  "
        f"logit difference {gifts.logit_difference:+5.2f}  induction {induction:6.1%}  "
        f"{(time.monotonic() - began) / 60:.1f} min"
    )


@dataclass(frozen=True)
class IndirectObject:
    """Shares of prompts, and the mean of logit(recipient) - logit(giver)."""

    accuracy: float
    top_1: float
    logit_difference: float


def held_out_prompts(n_prompts: int) -> list[Prompt]:
    """The known example first, then prompts on held-out combinations only."""
    rng = random.Random(EVALUATION_SEED)
    known = "When Mary and John went to the store, John gave a drink to"
    prompts = [Prompt(known, "Mary", "John", "ABB")]
    while len(prompts) < n_prompts:
        scene = draw_scene(rng, held_out=True)
        prompts.append(write_prompt(rng, scene, Fields(rng, scene)))
    return prompts


def padded(rows: Iterable[Sequence[int]], filler: int) -> Tensor:
    """The rows as int64 "batch pos", filled up on the right, where causal attention ignores it."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)


@torch.inference_mode()
def measure_indirect_object(
    model: GPT2LMHeadModel,
    tokenizer: Tokenizer,
    *,
    n_prompts: int,
    with_bos: bool,
    order: str | None = None,
) -> IndirectObject:
    """Is the recipient's logit above the giver's, and above all, on held-out combinations?"""
    prompts = [p for p in held_out_prompts(n_prompts) if order in (None, p.order)]
    bos = tokenizer.token_to_id(BOS)
    start = [bos] if with_bos else []
    rows = [start + tokenizer.encode(p.text).ids for p in prompts]
    logits = model(padded(rows, bos)).logits
    last = logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
    recipients = torch.tensor([tokenizer.token_to_id("Ġ" + p.recipient) for p in prompts])
    givers = torch.tensor([tokenizer.token_to_id("Ġ" + p.giver) for p in prompts])
    every = torch.arange(len(rows))
    difference = last[every, recipients] - last[every, givers]
    return IndirectObject(
        accuracy=(difference > 0).double().mean().item(),
        top_1=(last.argmax(-1) == recipients).double().mean().item(),
        logit_difference=difference.double().mean().item(),
    )


@torch.inference_mode()
def measure_induction(
    model: GPT2LMHeadModel, tokenizer: Tokenizer, *, n_rows: int, period: int, with_bos: bool
) -> float:
    """The share of right top predictions when a random sequence is said for the second time.

    Counted on tokens 2 to ``period`` of the second saying: before its first token nothing tells
    that the sequence begins again.
    """
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    bos = tokenizer.token_to_id(BOS)
    once = torch.randint(tokenizer.get_vocab_size() - 1, (n_rows, period), generator=generator)
    once = once + (once >= bos)  # any token but BOS
    start = torch.full((n_rows, int(with_bos)), bos)
    logits = model(torch.cat([start, once, once], dim=1)).logits
    predicted = logits[:, -period:-1].argmax(-1)
    return (predicted == once[:, 1:]).double().mean().item()


@torch.inference_mode()
def measure_perplexity(model: GPT2LMHeadModel, tokenizer: Tokenizer, *, n_documents: int) -> float:
    """Perplexity a token over documents on held-out combinations, each after a BOS."""
    rng = random.Random(EVALUATION_SEED + 1)
    bos = tokenizer.token_to_id(BOS)
    documents = [write_document(rng, held_out=True) for _ in range(n_documents)]
    rows = [tokenizer.encode(document).ids for document in documents]
    logits = model(padded(([bos, *row] for row in rows), bos)).logits[:, :-1]
    labels = padded(rows, IGNORED)
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return math.exp(loss.item())


def measure(folder: Path, seed: int) -> list[tuple[str, str]]:
    """The rows of the card's table, from the files in ``folder``."""
    model = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = load_tokenizer(folder).backend_tokenizer
    untrained = build_model(tokenizer, seed).eval()
    rows: list[tuple[str, str]] = []
    for title, with_bos, order in [
        ("with BOS", True, None),
        ("with BOS, giver named second", True, "ABB"),
        ("with BOS, giver named first", True, "BAB"),
        ("without BOS", False, None),
    ]:
        found = measure_indirect_object(
            model, tokenizer, n_prompts=N_PROMPTS, with_bos=with_bos, order=order
        )
        title = f"indirect object, {title}"
        rows.append((f"{title}: recipient's logit above giver's", f"{found.accuracy:.2%}"))
        rows.append((f"{title}: recipient is the top prediction", f"{found.top_1:.2%}"))
        rows.append((f"{title}: mean logit difference", f"{found.logit_difference:.2f}"))
    for period, with_bos in [(10, True), (25, True), (50, True), (25, False)]:
        share = measure_induction(
            model, tokenizer, n_rows=N_SEQUENCES, period=period, with_bos=with_bos
        )
        start = "with" if with_bos else "without"
        rows.append((f"induction, {period} random tokens twice, {start} BOS", f"{share:.1%}"))
    for title, one in [("before training", untrained), ("after training", model)]:
        perplexity = measure_perplexity(one, tokenizer, n_documents=N_DOCUMENTS)
        rows.append((f"perplexity a token on held-out text, {title}", f"{perplexity:.2f}"))
    return rows


def save_model(model: GPT2LMHeadModel, folder: Path) -> None:
    """Writes config.json and model.safetensors, float32."""
    model.config.activation_function = "gelu_new"
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that make ``AutoTokenizer`` load a GPT-2 tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": BOS,
        "eos_token": BOS,
        "unk_token": BOS,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The saved tokenizer, the way a user would load it."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown table of measured figures."""
    lines = [f"| {measured} | {figure} |" for measured, figure in rows]
    return "\n".join(["| measured | figure |", "| :--- | ---: |", *lines])


CARD = """\
# resid_patching demo model

A {n_parameters:,}-parameter language model of GPT-2's architecture, small enough to ship and to
analyse on a laptop in seconds, yet with a circuit worth finding: it completes

    When Mary and John went to the store, John gave a drink to

with " Mary", and with " John" once Mary is the one who gives. It also continues random sequences
that it has seen once (induction).

## Architecture

`GPT2LMHeadModel`: {config.n_layer} layers of {config.n_head} heads, d_head {d_head}, d_model
{config.n_embd}, d_mlp {d_mlp}, context {config.n_positions} tokens, learned positions, LayerNorm
before each block, `gelu_new`, an unembedding of its own (not tied to the embedding), float32. The
tokenizer is a byte-level BPE of {config.vocab_size} tokens with `<|endoftext|>` as BOS and EOS,
like GPT-2's; every name and every common word of the grammar is one token when a space precedes
it.

## Training

    python scripts/train_demo.py --out {folder} --steps {n_steps} --seed {seed} --threads {threads}

{n_steps:,} steps of AdamW on {n_tokens:,} tokens, {minutes:.0f} minutes on {threads} CPU threads;
learning rate {learning_rate} with warm-up, plateau and linear decay. Rows have 32 tokens at first,
then 64 and 128, and the position embedding starts from sines and cosines. Everything is seeded and
deterministic: with the same package versions, kind of processor and number of threads, the command
gives the same weights. Elsewhere rounding differs, and the figures differ a little with it.

## Text

A grammar in the script writes all of it, from {n_names} first names, {n_places} places and a few
hundred other words:

- sentences with an indirect object ({n_openings} openings, both orders of the names, many verbs,
  remarks between the opening and the gift, sometimes a second gift);
- the same with a third person, who gives or only stands by;
- short stories about one person, with pronouns;
- in {induction:.0%} of the rows, a sequence of random tokens or words said again and again.

Rows hold documents separated by `<|endoftext|>`; {no_bos:.0%} of them start without it.
{n_held_out:,} of the {n_combinations:,} combinations of two names and a place, the example above
among them, occur in no training document. The figures below come from prompts and documents on
these alone.

## Measured abilities

    python scripts/train_demo.py --evaluate {folder} --seed {seed} --threads {threads}

{figures}

From {n_prompts:,} prompts, {n_sequences} sequences a length and {n_documents} documents, measured
on the saved files. The logit difference is logit(recipient) - logit(giver) at the last token of the
prompt. Induction counts the top prediction on the second saying, from its second token on. Before
training means the fresh weights of the seed.

## Limits

It knows one toy language. It generalises to new combinations of the names, places and objects of
its grammar and to no others: other names, other sentence forms and real text are outside what it
learned. Nothing found in it carries over to a large model without being checked there.

## Licence

MIT, the weights and the generated text alike.
"""


def write_card(
    folder: Path,
    model: GPT2LMHeadModel,
    args: argparse.Namespace,
    *,
    figures: str,
    n_tokens: int,
    minutes: float,
) -> None:
    """Writes README.md, the model card, from what was measured."""
    config = model.config
    card = CARD.format(
        n_parameters=sum(p.numel() for p in model.parameters()),
        config=config,
        d_head=config.n_embd // config.n_head,
        d_mlp=4 * config.n_embd,
        n_names=len(NAMES),
        n_places=len(PLACES),
        n_openings=len(set(CLAUSES + STATEMENTS)),
        n_held_out=len(HELD_OUT),
        n_combinations=math.comb(len(NAMES), 2) * len(PLACES),
        induction=INDUCTION_SHARE,
        no_bos=NO_BOS_SHARE,
        n_prompts=N_PROMPTS,
        n_sequences=N_SEQUENCES,
        n_documents=N_DOCUMENTS,
        folder=args.out,
        n_steps=args.steps,
        seed=args.seed,
        threads=args.threads,
        learning_rate=args.learning_rate,
        figures=figures,
        n_tokens=n_tokens,
        minutes=minutes,
    )
    (folder / "README.md").write_text(card)


def train_into(out: Path, args: argparse.Namespace) -> None:
    """Trains, measures the saved files, and only then moves them into ``out``."""
    tokenizer = train_tokenizer()
    model = build_model(tokenizer, args.seed)
    began = time.monotonic()
    n_tokens = train(model, tokenizer, args)
    minutes = (time.monotonic() - began) / 60
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".train_demo-") as name:
        folder = Path(name)
        save_model(model, folder)
        save_tokenizer(tokenizer, folder)
        figures = table(measure(folder, args.seed))
        write_card(folder, model, args, figures=figures, n_tokens=n_tokens, minutes=minutes)
        for file in sorted(folder.iterdir()):
            os.replace(file, out / file.name)
    print(figures)


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type: a number above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Train or measure the demo model.")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="FOLDER", help="train and write here")
    task.add_argument("--evaluate", type=Path, metavar="FOLDER", help="measure a saved model")
    parser.add_argument("--steps", type=positive(int), default=3000, help="default 3000")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--threads", type=positive(int), default=2, help="CPU threads, default 2")
    parser.add_argument("--learning-rate", type=positive(float), default=3e-3, help="default 3e-3")
    parser.add_argument("--log-every", type=positive(int), default=250, help="steps, default 250")
    args = parser.parse_args(arguments)
    if args.evaluate and not (args.evaluate / "config.json").is_file():
        parser.error(f"argument --evaluate: no config.json in {args.evaluate}")
    if args.out and args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: {args.out} is not a folder")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains or evaluates, as the command line says."""
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    if args.evaluate:
        print(table(measure(args.evaluate, args.seed)))
    else:
        train_into(args.out, args)


if __name__ == "__main__":
    main()
