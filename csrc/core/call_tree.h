#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/chains.h"
#include "core/token_reader.h"

namespace agl {

// What a call brought into its rollout's prefix tree: the end of its prompt that was not there yet
// and its whole response. Its other tokens lie on the path of `parent`.
struct Run {
  int32_t parent;  // the run it branches off, -1 where it begins at a root
  int32_t call;
  int32_t begin;           // depth of its first token
  int32_t prompt_length;   // depth of its first response token
  int32_t end;             // depth just past its last token
  int64_t first_token;     // index in the tree's tokens
  const float* log_probs;  // one per response token, or null

  int32_t response_length() const { return end - prompt_length; }
};

// One rollout's prefix tree. Prompts run through whatever tokens are there; responses are always
// new tokens, also where an equal one is there. A radix tree over the contexts finds what a prompt
// shares with the calls before it, in time proportional to the tokens not seen before.
class CallTree {
 public:
  using Position = Chains::Position;

  explicit CallTree(SpareTokens* spare);

  // Adds a call and returns its run. `from` is a position the prompt is known to reach: nothing
  // before it is read. `log_probs`, one per response token or null, must outlive the tree.
  int32_t add(int32_t call, const TokenReader& prompt, const TokenReader& response,
              const float* log_probs, Position from = {});

  // The position of the first `depth` tokens of a run's path.
  Position position_of(int32_t run, int64_t depth) const;

  // Copies the tokens [begin, end) of a run's path.
  void copy_path(int32_t run, int32_t begin, int32_t end, int32_t* out) const;

  // Forgets the sequences that runs were read from; call before those go away.
  void forget_echoes();

  // Gives the tokens' memory back to the spare; nothing may be asked of the tree afterwards.
  void recycle();

  // Room for as many tokens, from the first call on.
  void reserve(int64_t tokens) { reserve_ = tokens; }

  const std::vector<Run>& runs() const { return runs_; }

 private:
  struct Node {
    int32_t parent;
    int32_t owner;  // the run that holds the node's tokens; of several the one added last
    int64_t begin;
    int64_t end;
    int32_t children;
  };

  Node& node(int32_t id) { return nodes_[static_cast<std::size_t>(id)]; }
  const Node& node(int32_t id) const { return nodes_[static_cast<std::size_t>(id)]; }
  const Run& run(int32_t id) const { return runs_[static_cast<std::size_t>(id)]; }

  // The token at depth d of a run's path is at [d], from the run's begin on. The array begins
  // inside tokens_: the path up to there was stored before the run.
  const int32_t* by_depth(int32_t id) const {
    return tokens_.data() + (run(id).first_token - run(id).begin);
  }

  int32_t child(int32_t parent, int32_t token) const;
  Position match(const TokenReader& prompt, Position from) const;
  void settle(int32_t run, Position at);
  int32_t split(Position at);

  SpareTokens* spare_;
  Tokens tokens_;  // of all runs, one behind the other
  std::vector<Run> runs_;
  std::vector<int32_t> leaves_;  // per run: the node where its path ends
  std::vector<Echo> echoes_;     // per run
  std::size_t forgotten_ = 0;    // runs whose echo is forgotten
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, int32_t> children_;  // (node, first token) -> node
  int64_t reserve_ = 0;
};

}  // namespace agl
