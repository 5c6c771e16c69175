#include "core/call_tree.h"

#include <algorithm>
#include <utility>

#include "core/child_key.h"

namespace agl {
namespace {

constexpr int32_t kRoot = 0;
constexpr int32_t kNone = -1;

}  // namespace

CallTree::CallTree(SpareTokens* spare) : spare_(spare), nodes_{{kNone, kNone, 0, 0, 0}} {}

int32_t CallTree::add(int32_t call, const TokenReader& prompt, const TokenReader& response,
                      const float* log_probs, Position from) {
  if (runs_.empty()) {
    tokens_ = spare_->take();
    tokens_.reserve(static_cast<std::size_t>(reserve_));
  }
  const Position at = match(prompt, from);
  const auto id = static_cast<int32_t>(runs_.size());
  const auto first = static_cast<int64_t>(tokens_.size());
  const int64_t tail = prompt.size() - at.depth;
  tokens_.resize(static_cast<std::size_t>(first + tail + response.size()));
  prompt.copy(at.depth, prompt.size(), tokens_.data() + first);
  response.copy(0, response.size(), tokens_.data() + first + tail);
  runs_.push_back({node(at.node).owner, call, static_cast<int32_t>(at.depth),
                   static_cast<int32_t>(prompt.size()),
                   static_cast<int32_t>(prompt.size() + response.size()), first, log_probs});
  echoes_.push_back({&prompt, &response});
  settle(id, at);
  return id;
}

CallTree::Position CallTree::position_of(int32_t id, int64_t depth) const {
  int32_t at = leaves_[static_cast<std::size_t>(id)];
  while (node(at).begin >= depth && at != kRoot) at = node(at).parent;
  return {at, depth};
}

void CallTree::copy_path(int32_t id, int32_t begin, int32_t end, int32_t* out) const {
  for (int32_t to = end; to > begin; id = run(id).parent) {
    const int32_t from = std::max(begin, run(id).begin);
    if (from >= to) continue;
    std::copy(by_depth(id) + from, by_depth(id) + to, out + (from - begin));
    to = from;
  }
}

void CallTree::forget_echoes() {
  for (; forgotten_ < echoes_.size(); ++forgotten_) echoes_[forgotten_] = {};
}

void CallTree::recycle() {
  if (!runs_.empty()) spare_->give(std::move(tokens_));
}

int32_t CallTree::child(int32_t parent, int32_t token) const {
  if (node(parent).children == 0) return kNone;
  const auto found = children_.find(child_key(parent, token));
  return found == children_.end() ? kNone : found->second;
}

CallTree::Position CallTree::match(const TokenReader& prompt, Position at) const {
  while (true) {
    const Node& here = node(at.node);
    const int64_t end = std::min(here.end, prompt.size());
    if (at.depth < end) {
      at.depth = prompt.first_difference(at.depth, end, by_depth(here.owner),
                                         echoes_[static_cast<std::size_t>(here.owner)]);
    }
    if (at.depth < here.end || at.depth == prompt.size() || here.children == 0) return at;
    const int32_t next = child(at.node, prompt.at(at.depth));
    if (next == kNone) return at;
    at.node = next;
  }
}

// Gives the run's tokens, which branch off at `at`, their place in the radix tree. Where equal
// tokens are there (a response that was sampled before), the node now stands for the run's.
void CallTree::settle(int32_t id, Position at) {
  const int32_t* tokens = by_depth(id);
  const int64_t end = run(id).end;
  int32_t last = at.depth < node(at.node).end ? split(at) : at.node;
  for (int64_t depth = at.depth; depth < end;) {
    int32_t next = child(last, tokens[depth]);
    if (next == kNone) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_.push_back({last, id, depth, end, 0});
      children_.emplace(child_key(last, tokens[depth]), next);
      ++node(last).children;
      depth = end;
    } else {
      depth = first_difference(tokens, by_depth(node(next).owner), depth,
                               std::min(end, node(next).end));
      if (depth < node(next).end) next = split({next, depth});
      node(next).owner = id;
    }
    last = next;
  }
  leaves_.push_back(last);
}

// Cuts a node in two at `at`; the lower part keeps the id, the new upper part is returned.
int32_t CallTree::split(Position at) {
  const auto upper = static_cast<int32_t>(nodes_.size());
  const Node lower = node(at.node);
  const int32_t* tokens = by_depth(lower.owner);
  nodes_.push_back({lower.parent, lower.owner, lower.begin, at.depth, 1});
  children_[child_key(lower.parent, tokens[lower.begin])] = upper;
  children_.emplace(child_key(upper, tokens[at.depth]), at.node);
  node(at.node).parent = upper;
  node(at.node).begin = at.depth;
  return upper;
}

}  // namespace agl
