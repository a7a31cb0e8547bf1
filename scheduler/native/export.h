#pragma once

#define OOC_EXPORT extern "C" __attribute__((visibility("default")))
