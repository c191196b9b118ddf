// See machine.h.
#pragma once

#include "machine.h"
