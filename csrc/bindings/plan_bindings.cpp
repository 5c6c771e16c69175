#include "bindings/plan_bindings.h"

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bindings/flat_arguments.h"
#include "bindings/python_calls.h"
#include "core/check.h"
#include "core/fill.h"
#include "core/flatten.h"
#include "core/parallel.h"

namespace agl::bindings {
namespace {

template <typename T>
py::array_t<T> to_numpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Reads an agl_fast.rows.options.RowOptions.
RowOptions read_options(py::handle options) {
  const auto flag = [](py::handle of, const char* name) { return of.attr(name).cast<bool>(); };
  const auto length = [&](const char* name) {
    const py::object value = options.attr(name);
    return value.is_none() ? 0 : value.cast<int64_t>();
  };
  const py::object rules = options.attr("rules");
  const Level level = flag(rules, "is_tree")        ? Level::kTree
                      : flag(rules, "merges_calls") ? Level::kTrajectory
                                                    : Level::kTransition;
  return {level,
          length("max_prompt_length"),
          length("max_response_length"),
          length("max_total_length"),
          length("tree_max_tokens"),
          flag(options, "drops_overlong"),
          flag(options, "masks_truncated"),
          flag(options, "zeroes_truncated")};
}

// The rollouts of the batch being collected.
class Planner {
 public:
  explicit Planner(py::handle options) : options_(read_options(options)) {}

  // Plans rollouts on as many threads as their tokens are worth, or throws and changes nothing.
  void add_many(const py::list& rollout_ids, const py::list& calls) {
    std::vector<std::deque<PythonCall>> read;
    int64_t tokens = 0;
    int64_t position_dims = position_dims_;
    for (std::size_t i = 0; i < rollout_ids.size(); ++i) {
      read.push_back(read_calls(rollout_ids[i], calls[i]));
      for (std::size_t call = 0; call < read.back().size(); ++call) {
        tokens += read.back()[call].prompt.size();
        position_dims = with_positions(position_dims, read.back()[call], rollout_ids[i],
                                       static_cast<int64_t>(call));
      }
    }
    std::vector<std::shared_ptr<RolloutPlan>> plans(read.size());
    const int64_t threads = threads_for(tokens * int64_t{sizeof(PyObject*)});
    if (threads > 1) {
      parallel_slices(static_cast<int64_t>(read.size()), threads, [&](int64_t begin, int64_t end) {
        const WithoutPython here;
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
          try {
            plans[i] = plan(read[i]);
          } catch (...) {
            plans[i] = nullptr;  // below, where Python can be asked and errors can be raised
          }
        }
      });
    }
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (!plans[i]) plans[i] = plan(read[i]);
    }
    for (auto& each : plans) rollouts_.push_back({std::move(each), {}});
    position_dims_ = position_dims;
  }

  // Begins a rollout whose calls come one by one with its first call. Throws and changes nothing,
  // or adds it.
  void open_with(py::handle rollout_id, int64_t base, int64_t keep, py::handle call) {
    rollouts_.push_back({std::make_shared<RolloutPlan>(options_.level, &spare_), {}});
    try {
      add_call(rollouts_.size() - 1, rollout_id, base, keep, call);
    } catch (...) {
      rollouts_.pop_back();
      throw;
    }
  }

  // Adds a call whose prompt is the first `keep` tokens of an earlier call's prompt and response
  // (base, -1 for none) and then the given prompt_ids. Throws and changes nothing, or adds it.
  void add_call(std::size_t rollout, py::handle rollout_id, int64_t base, int64_t keep,
                py::handle call) {
    Streamed& streamed = rollouts_.at(rollout);
    RolloutPlan& plan = *streamed.plan;
    const auto index = static_cast<int64_t>(plan.calls().size());
    PythonCall read(call, rollout_id, index, keep);
    read.check_ids();
    const int64_t position_dims = with_positions(position_dims_, read, rollout_id, index);
    const int64_t same_id = streamed.seen.last(read.response_id);
    read.classify(false, keep + read.prompt.size());
    const bool all_ids = read.call_class != CallClass::kLaidOut || same_id >= 0;
    const Base before = find_base(plan, rollout_id, index, base, keep, all_ids);

    const std::vector<int32_t> tail = read.prompt.ids();
    const DeltaReader prompt(before.ids, keep, tail.data(), read.prompt.size());
    if (same_id >= 0) {
      const bool duplicate = is_recorded(streamed, same_id, prompt, read.response);
      read.clashes = !duplicate;
      read.classify(duplicate, prompt.size());
    }
    plan.add(read.call_class, prompt, read.response, read.log_probs, read.positions,
             before.position);
    position_dims_ = position_dims;
    if (read.clashes) plan.mark_clash();
    if (read.call_class != CallClass::kLaidOut) plan.keep_context(prompt, read.response);
    plan.forget_echoes();
    streamed.seen.add(read.response_id);
  }

  void clear() {
    for (Streamed& each : rollouts_) {
      if (each.plan.use_count() == 1) each.plan->recycle();  // else rows point into it
    }
    rollouts_.clear();
    position_dims_ = 0;
  }
  std::size_t size() const { return rollouts_.size(); }

  RowSet rows(const py::array_t<float, py::array::c_style>& rewards) const {
    require(static_cast<std::size_t>(rewards.size()) == rollouts_.size(), "rewards has ",
            rewards.size(), " entries for ", rollouts_.size(), " rollouts");
    Plans plans;
    plans.reserve(rollouts_.size());
    for (const Streamed& each : rollouts_) plans.push_back(each.plan);
    py::gil_scoped_release release;
    RowSet set = make_rows(std::move(plans), rewards.data(), options_);
    set.position_dims = position_dims_;
    return set;
  }

  // (rollout, call, prompt length, index, kind, chain, closest chain, its context length) each.
  py::list mismatches() const {
    py::list out;
    for (std::size_t i = 0; i < rollouts_.size(); ++i) {
      for (const PlannedMismatch& each : rollouts_[i].plan->mismatches()) {
        const RolloutPlan& plan = *rollouts_[i].plan;
        const PlannedCall& call = plan.calls()[static_cast<std::size_t>(each.call)];
        out.append(py::make_tuple(i, each.call, call.prompt_length, each.index,
                                  static_cast<int>(each.kind), each.chain, each.closest,
                                  each.closest_context));
      }
    }
    return out;
  }

  py::array_t<int32_t> context(std::size_t rollout, std::size_t chain, int64_t begin,
                               int64_t end) const {
    const std::vector<int32_t>& tokens =
        rollouts_.at(rollout).plan->chains().list().at(chain).tokens;
    const auto size = static_cast<int64_t>(tokens.size());
    end = std::clamp<int64_t>(end, 0, size);
    begin = std::clamp<int64_t>(begin, 0, end);
    return py::array_t<int32_t>(end - begin, tokens.data() + begin);
  }

  // Response length of every call, rollouts end to end.
  py::array_t<int64_t> response_lengths() const {
    std::vector<int64_t> lengths;
    for (const Streamed& each : rollouts_) {
      for (const PlannedCall& call : each.plan->calls()) lengths.push_back(call.response_length);
    }
    return to_numpy(lengths);
  }

 private:
  struct Streamed {
    std::shared_ptr<RolloutPlan> plan;
    SeenResponseIds seen;  // while calls come one by one
  };

  struct Base {
    const int32_t* ids = nullptr;  // null too where they lie scattered and are not asked for
    Chains::Position position;
    std::vector<int32_t> gathered;
  };

  // A rollout's calls, alive together: later ones recognise earlier ones' tokens.
  static std::deque<PythonCall> read_calls(py::handle rollout_id, py::handle calls) {
    const auto items = py::reinterpret_steal<py::object>(
        PySequence_Fast(calls.ptr(), "calls must be a sequence of Call"));
    if (!items) throw py::error_already_set();
    SeenResponseIds seen;
    std::deque<PythonCall> read;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
      PythonCall& call = read.emplace_back(PySequence_Fast_GET_ITEM(items.ptr(), i), rollout_id, i);
      int64_t same_id = seen.last(call.response_id);
      call.clashes = same_id >= 0;
      while (same_id >= 0 && !call.same_ids(read[static_cast<std::size_t>(same_id)])) {
        same_id = seen.before(same_id);
      }
      if (same_id >= 0) call.clashes = false;
      call.classify(same_id >= 0, call.prompt.size());
      seen.add(call.response_id);
    }
    return read;
  }

  // The dimensions of positions of a batch to which the call is added; 0: none has positions.
  int64_t with_positions(int64_t position_dims, const PythonCall& call, py::handle rollout_id,
                         int64_t index) const {
    const int64_t dims = call.positions.dims;
    if (dims == 0) return position_dims;
    const std::string where = Where{"position_ids", rollout_id, index}.text();
    require(options_.level != Level::kTree, where,
            ": level tree numbers tokens by their depth; expected None");
    require(position_dims == 0 || dims == position_dims, where, " has ", dims,
            " dimensions, but earlier calls of the batch have ", position_dims);
    return dims;
  }

  // Whether the ids are those of the call `same_id`, or of one before it with its response_id.
  static bool is_recorded(const Streamed& streamed, int64_t same_id, const TokenReader& prompt,
                          const TokenReader& response) {
    std::vector<int32_t> ids(static_cast<std::size_t>(prompt.size() + response.size()));
    prompt.copy(0, prompt.size(), ids.data());
    response.copy(0, response.size(), ids.data() + prompt.size());
    const RolloutPlan& plan = *streamed.plan;
    for (; same_id >= 0; same_id = streamed.seen.before(same_id)) {
      const PlannedCall& earlier = plan.calls()[static_cast<std::size_t>(same_id)];
      if (earlier.prompt_length == prompt.size() && earlier.response_length == response.size() &&
          plan.context_of(earlier) == ids) {
        return true;
      }
    }
    return false;
  }

  std::shared_ptr<RolloutPlan> plan(const std::deque<PythonCall>& read) {
    auto made = std::make_shared<RolloutPlan>(options_.level, &spare_);
    int64_t longest = 0;
    for (const PythonCall& call : read) {
      longest = std::max(longest, call.prompt.size() + call.response.size());
    }
    made->reserve(longest);
    for (const PythonCall& call : read) {
      if (call.call_class != CallClass::kLaidOut) call.check_ids();
      made->add(call.call_class, call.prompt, call.response, call.log_probs, call.positions);
      if (call.clashes) made->mark_clash();
    }
    made->forget_echoes();
    return made;
  }

  // `all_ids`: also those that are known to be in the tree.
  static Base find_base(const RolloutPlan& plan, py::handle rollout_id, int64_t call, int64_t base,
                        int64_t keep, bool all_ids) {
    const std::string where = Where{"", rollout_id, call}.text();
    if (base == -1) {
      require(keep == 0, where, "keep must be 0 without a base_call, got ", keep);
      return {};
    }
    require(base >= 0 && base < call, where, "base_call must be an earlier call, got ", base);
    const PlannedCall& from = plan.calls()[static_cast<std::size_t>(base)];
    const int64_t context = from.prompt_length + from.response_length;
    require(keep >= 0 && keep <= context, where, "keep must be from 0 to the ", context,
            " tokens of call ", base, ", got ", keep);
    if (from.chain < 0) return {from.context.data(), {}, {}};
    if (plan.level() == Level::kTree) {
      Base found{nullptr, plan.tree().position_of(from.chain, keep), {}};
      if (all_ids) {
        found.gathered.resize(static_cast<std::size_t>(keep));
        plan.tree().copy_path(from.chain, 0, static_cast<int32_t>(keep), found.gathered.data());
        found.ids = found.gathered.data();
      }
      return found;
    }
    const Chain& chain = plan.chains().list()[static_cast<std::size_t>(from.chain)];
    return {chain.tokens.data(), plan.chains().position_of(from.chain, keep), {}};
  }

  RowOptions options_;
  SpareTokens spare_;
  std::vector<Streamed> rollouts_;
  int64_t position_dims_ = 0;  // of calls that have position ids; 0: none has
};

py::array_t<int64_t> counts_of(const RowSet& set) {
  constexpr py::ssize_t kColumns = 11 + kNumDropReasons;
  py::array_t<int64_t> out({static_cast<py::ssize_t>(set.counts.size()), kColumns});
  int64_t* at = out.mutable_data();
  for (const RolloutCounts& each : set.counts) {
    for (const int64_t count : {each.sampled, each.trained, each.truncated, each.duplicate,
                                each.empty_calls, each.empty_rows, each.rows, each.chains,
                                each.cut_chains, int64_t{each.lost_tokens}, each.clashes}) {
      *at++ = count;
    }
    at = std::copy(each.dropped.begin(), each.dropped.end(), at);
  }
  return out;
}

void fill_padded_rows(const RowSet& set, int64_t prompt_width, int64_t response_width,
                      int64_t pad_token_id, const py::dict& outputs) {
  require(prompt_width >= set.longest.prompt && response_width >= set.longest.response, "rows of ",
          set.longest.prompt, " and ", set.longest.response, " tokens do not fit widths ",
          prompt_width, " and ", response_width);
  const PaddedOutput out = padded_output(outputs, set.position_dims);
  py::gil_scoped_release release;
  fill_padded(set.rows.data(), static_cast<int64_t>(set.rows.size()),
              {prompt_width, response_width}, pad_token_id, out);
}

void fill_jagged_rows(const RowSet& set, const py::dict& outputs) {
  const auto required = [&](const char* name) { return outputs[name].cast<std::uintptr_t>(); };
  const auto optional = [&](const char* name) {
    return outputs.contains(name) ? required(name) : 0;
  };
  const JaggedOutput out{
      address<int64_t>(required("prompts")),          address<int64_t>(required("responses")),
      address<int64_t>(required("input_ids")),        address<int64_t>(required("position_ids")),
      address<int64_t>(required("response_mask")),    address<int64_t>(optional("call_index")),
      address<float>(required("token_level_scores")), address<float>(optional("rollout_log_probs")),
      std::max<int64_t>(set.position_dims, 1)};
  py::gil_scoped_release release;
  fill_jagged(set.rows.data(), static_cast<int64_t>(set.rows.size()), out);
}

// Whether a row's positions do not count up by one somewhere.
bool branches(const RowSet& set) { return !set.jumps.empty(); }

// (prompt length, response length) per row: (B,), (B,).
py::tuple lengths_of(const RowSet& set) {
  std::vector<int64_t> prompts;
  std::vector<int64_t> responses;
  for (const Row& row : set.rows) {
    prompts.push_back(row.prompt_length);
    responses.push_back(row.response_length);
  }
  return py::make_tuple(to_numpy(prompts), to_numpy(responses));
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<RowSet>(m, "Rows")
      .def("__len__", [](const RowSet& set) { return set.rows.size(); })
      .def_property_readonly("longest",
                             [](const RowSet& set) {
                               return py::make_tuple(set.longest.prompt, set.longest.response);
                             })
      .def_property_readonly("lengths", &lengths_of)
      .def_readonly("any_log_probs", &RowSet::any_log_probs)
      .def_readonly("position_dims", &RowSet::position_dims)
      .def_property_readonly("branches", &branches)
      .def_property_readonly("rollout", [](const RowSet& set) { return to_numpy(set.rollout); })
      .def_property_readonly("first_call",
                             [](const RowSet& set) { return to_numpy(set.first_call); })
      .def_property_readonly("marked", [](const RowSet& set) { return to_numpy(set.marked); })
      .def_property_readonly("has_log_probs",
                             [](const RowSet& set) { return to_numpy(set.has_log_probs); })
      .def_property_readonly("counts", &counts_of)
      .def("fill_padded", &fill_padded_rows, py::arg("prompt_width"), py::arg("response_width"),
           py::arg("pad_token_id"), py::kw_only(), py::arg("outputs"))
      .def("fill_jagged", &fill_jagged_rows, py::kw_only(), py::arg("outputs"))
      .def(
          "flatten",
          [](const RowSet& set) {
            require(!branches(set), "flat rows count their positions up by one");
            return FlatRows(set.rows.data(), static_cast<int64_t>(set.rows.size()),
                            set.position_dims);
          },
          py::keep_alive<0, 1>());

  py::class_<Planner>(m, "Planner")
      .def(py::init<py::handle>(), py::arg("options"))
      .def("add_many", &Planner::add_many, py::arg("rollout_ids"), py::arg("calls"))
      .def("open_with", &Planner::open_with, py::arg("rollout_id"), py::arg("base_call"),
           py::arg("keep"), py::arg("call"))
      .def("add_call", &Planner::add_call, py::arg("rollout"), py::arg("rollout_id"),
           py::arg("base_call"), py::arg("keep"), py::arg("call"))
      .def("clear", &Planner::clear)
      .def("__len__", &Planner::size)
      .def("rows", &Planner::rows, py::arg("rewards").noconvert())
      .def("mismatches", &Planner::mismatches)
      .def("context", &Planner::context, py::arg("rollout"), py::arg("chain"), py::arg("begin"),
           py::arg("end"))
      .def("response_lengths", &Planner::response_lengths);
}

}  // namespace agl::bindings
