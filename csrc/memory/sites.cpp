#include "memory/sites.h"
#include <c10/util/Exception.h>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "base/one_line.h"

namespace brimful::memory {
namespace {

struct Sites {
  std::mutex mutex;
  std::unordered_map<std::string, uint32_t> ids;
  std::deque<Site> sites{Site{}};
};

Sites& all_sites() {
  static auto* const sites = new Sites;  // for ever: memory is allocated until the end
  return *sites;
}

std::atomic<SiteProvider> the_provider{nullptr};

}  // namespace

void set_site_provider(SiteProvider provider) noexcept {
  the_provider.store(provider, std::memory_order_relaxed);
}

SiteProvider site_provider() noexcept {
  return the_provider.load(std::memory_order_relaxed);
}

void lock_sites() {
  all_sites().mutex.lock();
}

void unlock_sites() {
  all_sites().mutex.unlock();
}

Site site(uint32_t id) {
  auto& all = all_sites();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK_INDEX(id < all.sites.size(), "there is no such site (id: ", id,
                    ", sites: ", all.sites.size(), "); take the number from a block");
  return all.sites[id];
}

uint32_t site_id(const Site& site) {
  if (site.file.empty() && site.function.empty()) {
    return kNoSite;
  }
  const std::string key = site.file + '\0' + std::to_string(site.line) + '\0' + site.function;
  auto& all = all_sites();
  const std::lock_guard lock(all.mutex);
  const auto [found, is_new] = all.ids.try_emplace(key, static_cast<uint32_t>(all.sites.size()));
  if (is_new) {
    all.sites.push_back(site);
  }
  return found->second;
}

std::string to_string(const Site& site) {
  if (site.file.empty()) {
    return site.function.empty() ? "(unknown)" : one_line(site.function);
  }
  const std::string where = one_line(site.file) + ":" + std::to_string(site.line);
  return site.function.empty() ? where : where + " (" + one_line(site.function) + ")";
}

}  // namespace brimful::memory
