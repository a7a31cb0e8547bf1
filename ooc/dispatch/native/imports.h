// Replaces what libtorch_cpu has imported from other libraries: its kernels then call a function of ours. Once, and for
// good. Included by what replaces something. Elsewhere than on Linux, or where torch has no such import (a build in one
// piece), nothing is replaced.
#pragma once

#include <cstdint>

#if defined(__linux__) && defined(__LP64__)
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#endif

namespace {

struct Replacement {
  const char* symbol;  // as the linker knows it
  uintptr_t ours;
  long num_replaced = 0;
};

#if defined(__linux__) && defined(__LP64__)

// Let a slot of a library's table of imported functions lead to ours. The table may be read-only since it was filled.
bool replace(uintptr_t slot, uintptr_t ours) {
  const auto page_nbytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(slot & ~(page_nbytes - 1));
  if (mprotect(page, page_nbytes, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(reinterpret_cast<uintptr_t*>(slot), ours, __ATOMIC_RELEASE);
  return true;
}

// Called for each library of the process.
int visit_library(dl_phdr_info* library, size_t, void* wanted) {
  auto* replacement = static_cast<Replacement*>(wanted);
  if (library->dlpi_name == nullptr || std::strstr(library->dlpi_name, "libtorch_cpu.") == nullptr) return 0;
  const ElfW(Dyn)* entry = nullptr;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = library->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) entry = reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr + header.p_vaddr);
  }
  uintptr_t symbols = 0, names = 0, imports = 0;
  size_t imports_nbytes = 0;
  for (; entry != nullptr && entry->d_tag != DT_NULL; ++entry) {
    // glibc has made addresses of these; other C libraries leave them as offsets.
    const uintptr_t address = entry->d_un.d_ptr + (entry->d_un.d_ptr < library->dlpi_addr ? library->dlpi_addr : 0);
    if (entry->d_tag == DT_SYMTAB) symbols = address;
    if (entry->d_tag == DT_STRTAB) names = address;
    if (entry->d_tag == DT_JMPREL) imports = address;
    if (entry->d_tag == DT_PLTRELSZ) imports_nbytes = entry->d_un.d_val;
    if (entry->d_tag == DT_PLTREL && entry->d_un.d_val != DT_RELA) return 0;
  }
  if (symbols == 0 || names == 0 || imports == 0) return 0;
  const auto* rows = reinterpret_cast<const ElfW(Rela)*>(imports);
  for (size_t i = 0; i < imports_nbytes / sizeof(ElfW(Rela)); ++i) {
    const auto& symbol = reinterpret_cast<const ElfW(Sym)*>(symbols)[ELF64_R_SYM(rows[i].r_info)];
    if (std::strcmp(reinterpret_cast<const char*>(names + symbol.st_name), replacement->symbol) != 0) continue;
    replacement->num_replaced += replace(library->dlpi_addr + rows[i].r_offset, replacement->ours) ? 1 : 0;
  }
  return 0;
}

// How many imports of it there were.
long replace_import(const char* symbol, uintptr_t ours) {
  Replacement replacement{symbol, ours};
  dl_iterate_phdr(visit_library, &replacement);
  return replacement.num_replaced;
}

#else

long replace_import(const char*, uintptr_t) { return 0; }

#endif

}  // namespace
