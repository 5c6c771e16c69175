#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/rows.h"
#include "core/token_positions.h"
#include "core/token_reader.h"

namespace agl {

using Tokens = std::vector<int32_t>;

// Token memory of chains that are gone, for those to come: fresh memory is slow at its first touch.
// Any thread may take and give.
class SpareTokens {
 public:
  // An empty vector, with the capacity of an earlier one where there is any.
  Tokens take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return {};
    Tokens tokens = std::move(spare_.back());
    spare_.pop_back();
    return tokens;
  }

  void give(Tokens&& tokens) {
    tokens.clear();
    const std::lock_guard<std::mutex> lock(mutex_);
    spare_.push_back(std::move(tokens));
  }

 private:
  std::mutex mutex_;
  std::vector<Tokens> spare_;
};

// Calls merged because each prompt extends the context before it.
struct Chain {
  Tokens tokens;                  // the whole context: first prompt, then everything after
  std::vector<Segment> segments;  // cover what follows the first prompt
  int32_t prompt_length = 0;
  int32_t first_call = 0;
  int32_t leaf = 0;           // trie node where the context ends
  int32_t same_context = -1;  // next chain with an equal context, extended earlier
  TokenPositions positions;   // of the whole context, as its last call has them
  Echo echo;                  // valid while the rollout being added is alive

  int64_t context_length() const { return static_cast<int64_t>(tokens.size()); }
};

enum class MismatchKind : uint8_t {
  kShortened,
  kGenerationPrompt,
  kNewConversation,
  kHistoryRewritten,
  kPositionsChanged
};

// What became of a call that was laid out.
struct Placement {
  int32_t chain;
  bool mismatched;  // it extended no chain although one was open; then:
  int32_t closest;  // the open chain that shares most of its prompt, of equals the last extended
  int64_t index;    // length of the shared prefix, its positions included
  int64_t closest_context;  // context length of that chain at the time
  MismatchKind kind;
};

// The chains of one rollout. A radix tree over their contexts finds, in time proportional to the
// tokens not seen before, the longest context that is a prefix of a prompt.
class Chains {
 public:
  // Where in the tree a prompt stopped matching: `depth` tokens from the root, inside `node`.
  struct Position {
    int32_t node;
    int64_t depth;
  };

  explicit Chains(SpareTokens* spare);

  // Appends the call to the chain with the longest context that is a prefix of its prompt, with
  // the same positions (of equals the one extended last), or opens a new chain. `from` is a
  // position in the tree the prompt is known to reach. `log_probs`, one per response token or null,
  // must outlive the chains.
  Placement add(int32_t call, const TokenReader& prompt, const TokenReader& response,
                const float* log_probs, TokenPositions positions, Position from = {});

  // Opens a chain of its own for the call, whatever else is there; it is never extended.
  Placement add_alone(int32_t call, const TokenReader& prompt, const TokenReader& response,
                      const float* log_probs, TokenPositions positions);

  // The position of the first `depth` tokens of a chain.
  Position position_of(int32_t chain, int64_t depth) const;

  // Forgets the sequences that chains were read from; call before those go away.
  void forget_echoes();

  // Gives the tokens' memory back to the spare; nothing may be asked of the chains afterwards.
  void recycle();

  // Room for the first chain opened, so that it grows in place.
  void reserve(int64_t tokens) { reserve_ = tokens; }

  const std::vector<Chain>& list() const { return chains_; }

 private:
  struct Node {
    int32_t parent;
    int32_t owner;  // a chain that passes through: its tokens[begin, end) are the node's
    int64_t begin;
    int64_t end;
    int32_t ending;  // chain whose context ends here, the one extended last; -1
    int32_t latest;  // chain extended last of those that pass through; -1
    int32_t children;
  };

  Node& node(int32_t id) { return nodes_[static_cast<std::size_t>(id)]; }
  const Node& node(int32_t id) const { return nodes_[static_cast<std::size_t>(id)]; }
  Chain& chain(int32_t id) { return chains_[static_cast<std::size_t>(id)]; }
  const Chain& chain(int32_t id) const { return chains_[static_cast<std::size_t>(id)]; }

  Position match(const TokenReader& sequence, Position from) const;
  int32_t longest_context(Position at, const TokenPositions& positions) const;
  int32_t open(int32_t call, const TokenReader& prompt, int64_t response_length, Position at);
  void append(Chain& to, int32_t call, const TokenReader& prompt, const TokenReader& response,
              const float* log_probs, TokenPositions positions);
  void unlink(int32_t chain);
  void settle(int32_t chain, Position at);
  int32_t split(Position at);
  void touch(int32_t chain);
  Placement compare(const TokenReader& prompt, const TokenPositions& positions, Position at) const;
  MismatchKind kind_of(const TokenReader& prompt, int64_t index, const Chain& closest) const;

  SpareTokens* spare_;
  std::vector<Chain> chains_;
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, int32_t> children_;  // (node, first token) -> node
  int64_t reserve_ = 0;
};

}  // namespace agl
