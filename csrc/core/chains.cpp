#include "core/chains.h"

#include <algorithm>

#include "core/child_key.h"

namespace agl {
namespace {

constexpr int32_t kRoot = 0;

// A generation prompt is what a chat template puts in front of an answer, such as an empty think
// block. It is shorter than this.
constexpr int64_t kGenerationPrompt = 32;
// One that takes the place of another is shorter than this, and so is the other.
constexpr int64_t kOtherPrompt = 8;
// So many of an answer's tokens identify it in a prompt.
constexpr int64_t kAnswerProbe = 4;

// Whether the prompt has, from `index` on, the answer's tokens from `from` on.
bool has_answer(const TokenReader& prompt, int64_t index, const int32_t* answer, int64_t from,
                int64_t length) {
  const int64_t n = std::min(kAnswerProbe, length - from);
  if (index + n > prompt.size()) return false;
  for (int64_t i = 0; i < n; ++i) {
    if (prompt.at(index + i) != answer[from + i]) return false;
  }
  return true;
}

}  // namespace

Chains::Chains(SpareTokens* spare) : spare_(spare), nodes_{{-1, -1, 0, 0, -1, -1, 0}} {}

Placement Chains::add(int32_t call, const TokenReader& prompt, const TokenReader& response,
                      const float* log_probs, TokenPositions positions, Position from) {
  const Position at = match(prompt, from);
  int32_t id = longest_context(at, positions);
  Placement placement{id, false, -1, 0, 0, MismatchKind::kShortened};
  if (id < 0) {
    if (!chains_.empty()) placement = compare(prompt, positions, at);
    id = placement.chain = open(call, prompt, response.size(), at);
    append(chain(id), call, prompt, response, log_probs, std::move(positions));
    settle(id, at);
    return placement;
  }

  Chain& extended = chain(id);
  const int32_t leaf = extended.leaf;
  const bool grows_in_place = node(leaf).owner == id && node(leaf).children == 0 &&
                              at.node == leaf && node(leaf).ending == id &&
                              extended.same_context < 0;
  append(extended, call, prompt, response, log_probs, std::move(positions));
  if (grows_in_place) {
    node(leaf).end = extended.context_length();
    touch(id);
  } else {
    unlink(id);
    settle(id, at);
  }
  return placement;
}

Placement Chains::add_alone(int32_t call, const TokenReader& prompt, const TokenReader& response,
                            const float* log_probs, TokenPositions positions) {
  const int32_t id = open(call, prompt, response.size(), {});
  append(chain(id), call, prompt, response, log_probs, std::move(positions));
  return {id, false, -1, 0, 0, MismatchKind::kShortened};
}

Chains::Position Chains::position_of(int32_t id, int64_t depth) const {
  int32_t at = chain(id).leaf;
  while (node(at).begin >= depth && at != kRoot) at = node(at).parent;
  return {at, depth};
}

void Chains::forget_echoes() {
  for (Chain& each : chains_) each.echo = {};
}

void Chains::recycle() {
  for (Chain& each : chains_) spare_->give(std::move(each.tokens));
}

Chains::Position Chains::match(const TokenReader& sequence, Position from) const {
  Position at = from;
  while (true) {
    const Node& here = node(at.node);
    const int64_t end = std::min(here.end, sequence.size());
    if (at.depth < end) {
      const Chain& owner = chain(here.owner);
      at.depth = sequence.first_difference(at.depth, end, owner.tokens.data(), owner.echo);
    }
    if (at.depth < here.end || at.depth == sequence.size() || here.children == 0) return at;
    const auto child = children_.find(child_key(at.node, sequence.at(at.depth)));
    if (child == children_.end()) return at;
    at.node = child->second;
  }
}

int32_t Chains::longest_context(Position at, const TokenPositions& positions) const {
  int32_t id = at.node;
  if (at.depth < node(id).end) id = node(id).parent;
  for (; id >= 0; id = node(id).parent) {
    for (int32_t ends = node(id).ending; ends >= 0; ends = chain(ends).same_context) {
      const int64_t length = node(id).end;
      if (chain(ends).positions.first_difference(positions, length) == length) return ends;
    }
  }
  return -1;
}

Placement Chains::compare(const TokenReader& prompt, const TokenPositions& positions,
                          Position at) const {
  const int32_t closest = node(at.node).latest;
  const int64_t context = chain(closest).context_length();
  if (at.depth == context) {  // all tokens are the same, so it was the positions
    const int64_t index = chain(closest).positions.first_difference(positions, context);
    return {-1, true, closest, index, context, MismatchKind::kPositionsChanged};
  }
  const MismatchKind kind = kind_of(prompt, at.depth, chain(closest));
  return {-1, true, closest, at.depth, context, kind};
}

// docs/rows.md, "Mismatches", where a token differs; without the kind that needs a tokenizer.
MismatchKind Chains::kind_of(const TokenReader& prompt, int64_t index, const Chain& closest) const {
  if (index == prompt.size()) return MismatchKind::kShortened;
  const MismatchKind other = index < closest.prompt_length ? MismatchKind::kNewConversation
                                                           : MismatchKind::kHistoryRewritten;
  // The answer behind the first difference; there is none where an answer itself differs.
  int64_t begin = closest.prompt_length;
  int64_t end = begin;
  bool sampled = false;
  for (const Segment& segment : closest.segments) {
    begin = end;
    end = closest.prompt_length + segment.end;
    sampled = segment.call >= 0;
    if (sampled && end > index) break;
  }
  if (!sampled || begin <= index || begin - index > kGenerationPrompt || index == 0) return other;
  const int32_t* answer = closest.tokens.data() + begin;
  const int64_t length = end - begin;
  // None before the answer, whose beginning (reasoning) may be left out as well.
  for (int64_t from = 0; from == 0 || from + 1 < length; ++from) {
    if (has_answer(prompt, index, answer, from, length)) return MismatchKind::kGenerationPrompt;
  }
  // Another one before the answer; between answers that would be an edited observation.
  if (index >= closest.prompt_length || begin - index > kOtherPrompt) return other;
  const int64_t last = std::min(index + kOtherPrompt, prompt.size() - 1);
  for (int64_t i = index + 1; i <= last; ++i) {
    if (has_answer(prompt, i, answer, 0, length)) return MismatchKind::kGenerationPrompt;
  }
  return other;
}

// A chain that holds its first prompt and nothing after it; tokens up to `at` are in the tree.
int32_t Chains::open(int32_t call, const TokenReader& prompt, int64_t response_length,
                     Position at) {
  Chain opened;
  opened.tokens = spare_->take();
  opened.first_call = call;
  opened.prompt_length = static_cast<int32_t>(prompt.size());
  const int64_t room = prompt.size() + response_length;
  opened.tokens.reserve(
      static_cast<std::size_t>(chains_.empty() ? std::max(room, reserve_) : room));
  opened.tokens.resize(static_cast<std::size_t>(prompt.size()));
  if (at.depth > 0) {
    std::copy_n(chain(node(at.node).owner).tokens.data(), at.depth, opened.tokens.data());
  }
  prompt.copy(at.depth, prompt.size(), opened.tokens.data() + at.depth);
  chains_.push_back(std::move(opened));
  return static_cast<int32_t>(chains_.size()) - 1;
}

void Chains::append(Chain& to, int32_t call, const TokenReader& prompt, const TokenReader& response,
                    const float* log_probs, TokenPositions positions) {
  const int64_t context = to.context_length();
  const int64_t observed = prompt.size() - context;
  to.tokens.resize(static_cast<std::size_t>(prompt.size() + response.size()));
  prompt.copy(context, prompt.size(), to.tokens.data() + context);
  response.copy(0, response.size(), to.tokens.data() + prompt.size());
  int32_t end = static_cast<int32_t>(context) - to.prompt_length;
  if (observed > 0) {
    end += static_cast<int32_t>(observed);
    to.segments.push_back({end, -1, nullptr});
  }
  end += static_cast<int32_t>(response.size());
  to.segments.push_back({end, call, log_probs});
  to.echo = {&prompt, &response};
  to.positions = std::move(positions);
}

// Takes the chain out of those that end at its leaf.
void Chains::unlink(int32_t id) {
  int32_t* link = &node(chain(id).leaf).ending;
  while (*link != id) link = &chain(*link).same_context;
  *link = chain(id).same_context;
  chain(id).same_context = -1;
}

// Gives the chain's context, known to be in the tree up to `at`, its place in the tree.
void Chains::settle(int32_t id, Position at) {
  Chain& settled = chain(id);
  at = match(SpanReader(settled.tokens.data(), settled.context_length()), at);
  int32_t end = at.depth < node(at.node).end ? split(at) : at.node;
  if (at.depth < settled.context_length()) {
    const auto leaf = static_cast<int32_t>(nodes_.size());
    const int32_t token = settled.tokens[static_cast<std::size_t>(at.depth)];
    nodes_.push_back({end, id, at.depth, settled.context_length(), -1, -1, 0});
    children_.emplace(child_key(end, token), leaf);
    ++node(end).children;
    end = leaf;
  }
  settled.leaf = end;
  settled.same_context = node(end).ending;
  node(end).ending = id;
  touch(id);
}

// Cuts a node in two at `at`; the lower part keeps the id, the new upper part is returned.
int32_t Chains::split(Position at) {
  const auto upper = static_cast<int32_t>(nodes_.size());
  const Node lower = node(at.node);
  const std::vector<int32_t>& tokens = chain(lower.owner).tokens;
  nodes_.push_back({lower.parent, lower.owner, lower.begin, at.depth, -1, lower.latest, 1});
  children_[child_key(lower.parent, tokens[static_cast<std::size_t>(lower.begin)])] = upper;
  children_.emplace(child_key(upper, tokens[static_cast<std::size_t>(at.depth)]), at.node);
  node(at.node).parent = upper;
  node(at.node).begin = at.depth;
  return upper;
}

void Chains::touch(int32_t id) {
  for (int32_t at = chain(id).leaf; at >= 0; at = node(at).parent) node(at).latest = id;
}

}  // namespace agl
