// Only the backward has it: see sm90_attention_bwd.cpp.
#pragma once

#include "machine.h"
