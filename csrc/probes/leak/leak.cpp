#include <brimful/probes/leak.h>

#include "base/format.h"
#include "base/text_stream.h"

namespace brimful::probes {
namespace {

std::string quoted(const std::string& code) {
  return "`" + code + "`";
}

bool begins_with_sum(const Holder& holder) {
  return holder.scalar && holder.node.starts_with("AddBackward");
}

bool has_graph(const Holder& holder) {
  return holder.has_graph || !holder.node.empty();
}

std::string advice_on_container(const Holder& holder, const std::string& grows) {
  if (has_graph(holder)) {
    return holder.scalar
               ? "keep numbers: append loss.item() to " + quoted(holder.container)
               : "keep it without its graph: put tensor.detach() into " + quoted(holder.container);
  }
  return "bound " + quoted(holder.container) + " (it " + grows +
         "), empty it after use, or move what it keeps to where there is room";
}

/// Of what grows by no fault of a graph.
std::string advice_on_growth(const std::string& path) {
  return "bound what " + quoted(path) +
         " keeps, empty it after use, or move it to where there is room";
}

std::string advice_on_chain(const Holder& holder) {
  return "cut the chain that begins at " + quoted(holder.container) +
         ": each link holds the one before it" + (has_graph(holder) ? ", and its graph" : "");
}

std::string advice_on_tensor(const Holder& holder, bool copied) {
  if (!has_graph(holder)) {
    return advice_on_growth(holder.path);
  }
  if (copied) {
    return "cut the graph between steps: put " + holder.path + ".detach() into it; " +
           advice_on_growth(holder.path);
  }
  if (begins_with_sum(holder)) {
    return "use " + holder.path + " += loss.item()";
  }
  return holder.scalar
             ? "keep a number: " + holder.path + " = loss.item(), or detach it"
             : "cut the graph between steps: " + holder.path + " = " + holder.path + ".detach()";
}

std::string advice_on_holder(const Holder& holder, bool copied) {
  if (holder.is_gradient) {
    return "call backward() without create_graph=True, or use torch.autograd.grad(): these "
           "gradients "
           "have graphs that hold each other";
  }
  if (holder.linked) {
    return advice_on_chain(holder);
  }
  switch (holder.kind) {
    case HolderKind::variable:
    case HolderKind::attribute:
      return advice_on_tensor(holder, copied);
    case HolderKind::sequence:
      return advice_on_container(holder, "grows by its items");
    case HolderKind::mapping:
      return advice_on_container(holder, "has one more key after each step");
    case HolderKind::closure:
      return std::string("do not let the function keep tensors: make a new closure each step") +
             (has_graph(holder) ? ", or detach them" : "");
    case HolderKind::lru_cache:
      return "give the cache a small maxsize, or key it by something else than tensors";
    case HolderKind::hook:
      return std::string("remove the hook (handle.remove()), or let it keep ") +
             (has_graph(holder) ? "tensor.detach() of the last step alone"
                                : "what the last step made alone");
    case HolderKind::traceback:
      return "keep str(error) in place of the exception, whose traceback holds the frames; or call "
             "traceback.clear_frames(error.__traceback__)";
    case HolderKind::cycle:
      return "break the reference cycle (weakref), or call gc.collect() after some steps";
    case HolderKind::notebook:
      return "end the cell with a semicolon, or empty the outputs: %reset -f out";
    case HolderKind::unknown:
      break;
  }
  return "nothing that could be named holds it: look for C++ code (a custom autograd function, a "
         "cache of a "
         "library) that keeps tensors of this line";
}

}  // namespace

const char* name_of(HolderKind kind) {
  switch (kind) {
    case HolderKind::variable:
      return "variable";
    case HolderKind::attribute:
      return "attribute";
    case HolderKind::sequence:
      return "sequence";
    case HolderKind::mapping:
      return "mapping";
    case HolderKind::closure:
      return "closure";
    case HolderKind::lru_cache:
      return "lru_cache";
    case HolderKind::hook:
      return "hook";
    case HolderKind::traceback:
      return "traceback";
    case HolderKind::cycle:
      return "cycle";
    case HolderKind::notebook:
      return "notebook";
    case HolderKind::unknown:
      break;
  }
  return "unknown";
}

std::string advice(const Leak& leak) {
  const Holder& holder = leak.holder;
  // Where a gradient has a graph, a backward() has made it.
  const bool through_graph = !holder.is_gradient && has_graph(holder);
  std::string more;
  if (leak.evaluation && through_graph) {
    more = "; nothing here calls backward(): run it under torch.no_grad()";
  } else if (leak.retained && through_graph && !holder.node.empty() && leak.bytes > 0) {
    more = "; call backward() without retain_graph=True, which keeps what the graph has saved";
  } else if (holder.numpy) {
    more =
        "; a NumPy array shares its tensor's memory: keep array.copy() of the part that is needed";
  }
  return advice_on_holder(holder, leak.copied) + more;
}

std::string to_string(const Leak& leak) {
  const Holder& holder = leak.holder;
  TextStream out;
  out << (holder.path.empty() ? "something unknown" : quoted(holder.path));
  out << " (" << (leak.sites.empty() ? "unknown line" : leak.sites.front());
  if (!holder.root.empty()) {
    out << "; " << holder.root;
  }
  out << ") ";
  if (leak.copied) {
    out << "is copied whole each time that it grows, " << leak.steps << " times by now";
  } else if (holder.node.empty()) {
    out << "keeps the tensors of " << leak.steps << " steps alive";
  } else {
    out << "keeps " << leak.steps << " graphs alive through " << holder.node;
  }
  if (leak.bytes_per_step > 0) {
    out << ", " << format_bytes(leak.bytes_per_step) << " a step";
  }
  out << (leak.filling ? ", and may still be filling (a cache that stops is no leak)" : "");
  out << "; " << advice(leak);
  return out.str();
}

}  // namespace brimful::probes
